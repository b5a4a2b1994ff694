"""Stands in for ssh where no network is needed: each "host" is this very machine.

Put on the PATH as `ssh` by `near_ssh`. A host named `nowhere` can't be reached.
"""

import os
import stat
import sys
from pathlib import Path

_REFUSED = "ssh: connect to host nowhere port 22: Connection refused"


def near_ssh(directory: Path) -> Path:
    """Write an executable `ssh` into a directory and give the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "ssh"
    program.write_text(
        f"#!{sys.executable} -S\nimport runpy\nrunpy.run_path({__file__!r})['main']()\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return directory


def main() -> None:
    """Be ssh: say which port was forwarded, and run the command here."""
    words = sys.argv[1:]
    place = words.index("--")
    host, *command = words[place + 1 :]
    if host == "nowhere":
        print(_REFUSED, file=sys.stderr)
        sys.exit(255)
    if "-R" in words:
        port = words[words.index("-R") + 1].rsplit(":", 1)[1]
        print(f"Allocated port {port} for remote forward to 127.0.0.1:{port}", file=sys.stderr)
        sys.stderr.flush()
    os.environ["SSH_CONNECTION"] = "127.0.0.1 50000 127.0.0.1 22"
    os.execv("/bin/sh", ["sh", "-c", " ".join(command)])
