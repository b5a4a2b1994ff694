"""A wheel of the installed Paceline, for hosts that have none: made from its own files."""

import base64
import hashlib
import io
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from paceline._version import __version__
from paceline.errors import UsageError

_ROOT = Path(__file__).parents[2]
_EPOCH = (1980, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: paceline\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel() -> tuple[str, bytes]:
    """Make the wheel; the same files give the same bytes.

    Returns:
        Its file name and its content.

    Raises:
        UsageError: Paceline isn't installed here as a package, so that what it needs isn't known.
    """
    try:
        about = distribution("paceline")
    except PackageNotFoundError:
        raise UsageError("--install needs Paceline to be installed here by pip") from None
    info = f"paceline-{__version__}.dist-info"
    content = {
        path.relative_to(_ROOT.parent).as_posix(): path.read_bytes()
        for path in sorted(_ROOT.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in ("METADATA", "entry_points.txt"):
        content[f"{info}/{name}"] = (about.read_text(name) or "").encode()
    content[f"{info}/WHEEL"] = _WHEEL.encode()
    record = f"{info}/RECORD"
    content[record] = _record(content, record).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"paceline-{__version__}-py3-none-any.whl", packed.getvalue()


def _record(content: dict[str, bytes], own: str) -> str:
    """List the files with their hashes, as the format of wheels wants it."""
    lines = []
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{own},,", ""])
