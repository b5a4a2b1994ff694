"""Sent to a host that has no Paceline, and run there by its bare Python: standard library only.

It gets `request` by its input's first line, which its receiver has read; it prints a line of JSON.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_MIN_PYTHON = (3, 11)
_WAIT_S = 1800.0


def has_version(python: str, version: str) -> bool:
    """Tell whether a Python has this version of Paceline."""
    program = "import paceline._version as v; print(v.__version__)"
    done = subprocess.run(
        [python, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    return done.returncode == 0 and done.stdout.strip() == version


def install(request: "dict[str, str]") -> str:
    """Make the environment unless it is there, and give the path of its Python."""
    own = request["python"] or sys.executable
    if has_version(own, request["version"]):
        return own
    if sys.version_info < _MIN_PYTHON:
        raise RuntimeError(f"its Python is {sys.version.split()[0]}, and Paceline needs 3.11")
    wheel = base64.b64decode(request["wheel"])
    digest = hashlib.sha256(wheel).hexdigest()[:12]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    made = home / f"{request['version']}-{digest}"
    python = made / "bin" / "python"
    if (made / "complete").exists():
        return str(python)
    # Checked again under the lock: another host with this home directory may have made it.
    home.mkdir(parents=True, exist_ok=True)
    with locked(home / f"{made.name}.lock"):
        if not (made / "complete").exists():
            make(made, request["name"], wheel)
    return str(python)


def make(made: Path, name: str, wheel: bytes) -> None:
    """Make the environment anew; what an earlier one left half done goes."""
    shutil.rmtree(made, ignore_errors=True)
    run([sys.executable, "-m", "venv", "--system-site-packages", str(made)])
    with tempfile.TemporaryDirectory(dir=made) as folder:
        file = Path(folder) / name
        file.write_bytes(wheel)
        python = str(made / "bin" / "python")
        run([python, "-m", "pip", "install", "--quiet", "--no-input", str(file)])
    # Last: what is cut off before leaves no such mark, and is made anew.
    (made / "complete").touch()


@contextlib.contextmanager
def locked(file: Path, wait_s: float = _WAIT_S) -> "Iterator[None]":
    """Hold a lock, since hosts with one home directory would make the environment all at once."""
    end_s = time.monotonic() + wait_s
    with file.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise RuntimeError(
                        f"{file} has been held by another for {wait_s:g} s"
                    ) from None
                time.sleep(0.2)
        yield


def run(command: "list[str]") -> None:
    """Run a command; what it says goes into the error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-2000:])


def answer(request: "dict[str, str]") -> None:
    """Install, and say where or why not."""
    try:
        answered = {"python": install(request)}
    except (OSError, RuntimeError) as error:
        answered = {"error": str(error)}
    print(json.dumps(answered))
