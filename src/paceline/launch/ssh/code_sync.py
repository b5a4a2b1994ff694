"""Brings to a host what it lacks: the working directory's code, and Paceline itself."""

import base64
import hashlib
import io
import json
import posixpath
import re
import shlex
import subprocess
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path, PurePosixPath

from paceline._version import __version__
from paceline.errors import InfrastructureError, UsageError
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.ssh.parallel_commands import Commands, on_each
from paceline.launch.ssh.ssh import NO_PROGRAM, OWN_FAILURE, explain, last_lines, plain_ssh_command

_SYNC_S, _INSTALL_S = 600.0, 1800.0
_USUAL_PYTHON = "python3"
_RECEIVER = (
    "import json, sys; request = json.loads(sys.stdin.readline()); scope = {}; "
    "exec(request['program'], scope); scope['answer'](request)"
)
_STREAM_BROKE = 12
"""Exit code of rsync where it didn't get to know ssh's."""
_OWN = "paceline"
"""Directory below the home directory of a host that is Paceline's: there it removes files."""
_HOME = re.compile(r"/root|/(home|Users)/[^/]+")
_WILD = re.compile(r"[\[\]*?\\]")


def sync_code(
    hosts: Sequence[Host],
    options: HostsOptions,
    directory: Path,
    keep: Sequence[str] = (),
    stop: threading.Event | None = None,
) -> None:
    """Copy a directory to every host by rsync, into the host's working directory.

    What git ignores stays here, and so do `.git` and `runs`. Below `~/paceline` of a host, what is
    there alone and isn't ignored is removed, but for snapshots, so that all have the same code;
    nothing is ever removed from a directory that the user named elsewhere.

    Args:
        hosts: Which; each with its working directory.
        keep: Paths below the directory that are neither copied nor touched on the hosts.
        stop: Set by another thread, it ends the copying.

    Raises:
        UsageError: There is no rsync here, or a host's directory is none to copy into.
        InfrastructureError: A copy failed or was stopped; the message is rsync's own.
    """

    def sync(order: tuple[Host, list[str]], commands: Commands) -> None:
        """Run one host's rsync command, and wait for its end."""
        host, command = order
        done = _run(commands, command, host, _SYNC_S)
        if done.returncode:
            raise InfrastructureError(_rsync_failure(host, done))

    orders = [(host, sync_command(host, options, directory, keep)) for host in hosts]
    on_each(orders, sync, stop)


def sync_command(
    host: Host, options: HostsOptions, directory: Path, keep: Sequence[str] = ()
) -> list[str]:
    """Write the rsync command for a host. Pure.

    Nothing of the paths is seen by a shell: `--protect-args` sends them in the protocol.

    Raises:
        UsageError: The host's directory is its root, a home directory, or not plain.
    """
    target = _target(host)
    name = f"[{host.name}]" if ":" in host.name else host.name
    return [
        *("rsync", "--archive", "--compress", "--mkpath", "--protect-args"),
        # After the copying, since what git ignores is by then known there as it is here.
        *(("--delete-after", "--filter=P snapshots/step-*/") if _is_own(target) else ()),
        *("--exclude=/.git", "--exclude=/runs", "--exclude=.launcher-*"),
        *(f"--exclude={pattern}" for pattern in map(_pattern, keep) if pattern),
        "--filter=:- .gitignore",
        f"--rsh={shlex.join([*plain_ssh_command(host, options), '--'])}",
        "--",
        f"{directory}/",
        f"{name}:{target}/",
    ]


def _target(host: Host) -> PurePosixPath:
    """Give the directory to copy into: absolute, or relative to the home directory."""
    named = host.directory or ""
    path = PurePosixPath(named)
    if path.parts[:1] == ("~",):
        path = PurePosixPath(*path.parts[1:])
    plain = bool(path.name) and ".." not in path.parts and not path.parts[0].startswith("~")
    if not plain or _HOME.fullmatch(str(path)):
        raise UsageError(
            f"{host.name}: --sync-code doesn't copy into dir={named!r}. Name a directory of its "
            "own for the code: dir=~/project, or an absolute path without .."
        )
    return path


def _is_own(target: PurePosixPath) -> bool:
    return target.parts[0] == _OWN and len(target.parts) > 1


def _pattern(path: str) -> str:
    """Write rsync's pattern for one path; empty where it isn't below the directory."""
    plain = posixpath.normpath(path)
    if plain in (".", "..") or plain.startswith(("/", "../")):
        return ""
    # Only where there is something to escape does rsync take a backslash for an escape.
    return "/" + (_WILD.sub(r"\\\g<0>", plain) if re.search(r"[\[*?]", plain) else plain)


def _rsync_failure(host: Host, done: subprocess.CompletedProcess[str]) -> str:
    code, output = done.returncode, done.stderr or done.stdout
    # The remote shell's lines name the cause, not rsync's own.
    of_others = "\n".join(line for line in output.splitlines() if not line.startswith("rsync"))
    broke = code == _STREAM_BROKE
    if code in NO_PROGRAM or (broke and "rsync" in of_others and "not found" in of_others):
        return f"{host.name}: there is no rsync there: install it"
    if code == OWN_FAILURE or broke:
        return explain(host, None if broke else code, of_others or output)
    return f"{host.name}: rsync ended with code {code}: {last_lines(output)}"


def install(
    hosts: Sequence[Host], options: HostsOptions, stop: threading.Event | None = None
) -> list[Host]:
    """Give every host a Python that has this Paceline.

    Where the host's Python has it, that is the one. Else an environment is made below
    `~/.cache/paceline`, by the host's own pip and its registry, and kept for the next time.

    Args:
        stop: Set by another thread, it ends the waiting for them.

    Returns:
        The hosts with their Python.

    Raises:
        InfrastructureError: It failed or was stopped; the message has the end of what pip said.
    """
    name, wheel = build_wheel()
    program = files("paceline.launch.ssh").joinpath("installer.py").read_text()

    def install_on(host: Host, commands: Commands) -> Host:
        """Install on one host: program and wheel go through the input of one ssh command."""
        request = {
            "program": program,
            "python": host.python or "",
            "version": __version__,
            "name": name,
            "wheel": base64.b64encode(wheel).decode(),
        }
        command = [*plain_ssh_command(host, options), "--", host.name, receiver_command(host)]
        done = _run(commands, command, host, _INSTALL_S, json.dumps(request) + "\n")
        if done.returncode:
            output = done.stderr or done.stdout
            raise InfrastructureError(explain(host, done.returncode, output, _first_python(host)))
        return replace(host, python=_python_of(host, done.stdout))

    return on_each(hosts, install_on, stop)


def receiver_command(host: Host) -> str:
    """Write what a host without Paceline runs: a program that comes through its input. Pure."""
    return shlex.join(["exec", _first_python(host), "-c", _RECEIVER])


def _first_python(host: Host) -> str:
    return host.python or _USUAL_PYTHON


def _python_of(host: Host, output: str) -> str:
    """Read the installer's answer, which the host's shell may have put other lines around."""
    for line in reversed(output.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and "error" in answer:
            failed = f"{host.name}: Paceline can't be installed: {answer['error']}"
            raise InfrastructureError(failed)
        if isinstance(answer, dict) and isinstance(answer.get("python"), str):
            return str(answer["python"])
    raise InfrastructureError(
        f"{host.name}: {_first_python(host)} there didn't say where it has put Paceline: "
        f"{last_lines(output)}"
    )


def _run(
    commands: Commands, command: Sequence[str], host: Host, timeout_s: float, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command that reaches a host."""
    program = command[0]
    try:
        return commands.run(command, timeout_s, text)
    except FileNotFoundError:
        raise UsageError(f"there is no {program} on this machine: install it") from None
    except subprocess.TimeoutExpired:
        raise InfrastructureError(f"{host.name}: {program} took over {timeout_s:g} s") from None


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
    # Collect the package's files, then its metadata, and at last the record with their hashes.
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
    # Fixed times and order make the bytes, and so the hash that names the environment, the same.
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"paceline-{__version__}-py3-none-any.whl", packed.getvalue()


# Format: https://packaging.python.org/en/latest/specifications/recording-installed-packages/
def _record(content: dict[str, bytes], own: str) -> str:
    """List the files with their hashes, as the format of wheels wants it."""
    lines = []
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{own},,", ""])
