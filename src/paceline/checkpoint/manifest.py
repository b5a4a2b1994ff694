"""A snapshot's manifest: each file's size and SHA-256, and a SHA-256 over the manifest itself."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import SnapshotError
from paceline.files import parse_json

FORMAT = 2
KNOWN_FORMATS = (2,)
TENSORS = "tensors.safetensors"
STATE = "state.json"

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Expected size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Files of a snapshot with their checksums."""

    step: int
    files: Mapping[str, FileEntry]
    """Name -> entry, of `tensors.safetensors` and `state.json`."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Write a manifest in the one form that `decode_body` accepts."""
    files = {name: asdict(entry) for name, entry in manifest.files.items()}
    return _encode({"files": files, "format": FORMAT, "step": manifest.step})


def decode_body(content: bytes, path: Path | str) -> Mapping[str, object]:
    """Check that a manifest of any format version is as it was written.

    Returns:
        The manifest's entries, "format" among them as an integer.

    Raises:
        SnapshotError: A bit of it differs.
    """
    try:
        parsed = parse_json(content)
    except ValueError:
        parsed = None
    body = {n: v for n, v in parsed.items() if n != "sha256"} if isinstance(parsed, dict) else {}
    if type(body.get("format")) is not int or _encode(body) != content:
        raise SnapshotError(f"{path} is damaged: it doesn't match its own SHA-256")
    return body


def read_manifest(content: bytes, path: Path | str) -> Manifest:
    """Read a manifest.

    Raises:
        SnapshotError: It is damaged, its format version is unknown, or the entries can't be.
    """
    body = decode_body(content, path)
    if body["format"] not in KNOWN_FORMATS:
        known = ", ".join(map(str, KNOWN_FORMATS))
        raise SnapshotError(
            f"{path} is of format version {body['format']}; this Paceline knows: {known}. "
            "Read it with the Paceline that wrote it, or a newer one"
        )
    step, files = body.get("step"), body.get("files")
    if type(step) is not int or step < 0 or not isinstance(files, dict) or len(body) != 3:
        raise SnapshotError(f"{path} isn't a manifest: it must hold a step and files")
    if files.keys() != {TENSORS, STATE}:
        raise SnapshotError(
            f"{path} must name {TENSORS} and {STATE}, it names {', '.join(map(repr, files))}"
        )
    return Manifest(step=step, files={n: _entry(n, e, path) for n, e in files.items()})


def _entry(name: str, entry: object, path: Path | str) -> FileEntry:
    if not isinstance(entry, dict) or entry.keys() != {"bytes", "sha256"}:
        raise SnapshotError(f"{path}: the entry of {name} must hold bytes and sha256")
    size, digest = entry["bytes"], entry["sha256"]
    if type(size) is not int or size < 0:
        raise SnapshotError(f"{path}: the size of {name} can't be {size!r}")
    if type(digest) is not str or not _SHA256.fullmatch(digest):
        raise SnapshotError(f"{path}: the SHA-256 of {name} can't be {digest!r}")
    return FileEntry(bytes=size, sha256=digest)


def _encode(body: Mapping[str, object]) -> bytes:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    signed = {**body, "sha256": digest}
    return (json.dumps(signed, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()
