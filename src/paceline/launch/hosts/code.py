"""Brings to a host what it lacks: the working directory's code, and Paceline itself."""

import base64
import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

from paceline._version import __version__
from paceline.errors import InfrastructureError, UsageError
from paceline.launch.hosts.hostfile import Host
from paceline.launch.hosts.options import HostsOptions
from paceline.launch.hosts.ssh import explain, ssh_words
from paceline.launch.hosts.wheel import build_wheel

T = TypeVar("T")

_SYNC_S, _INSTALL_S = 600.0, 1800.0
_USUAL_PYTHON = "python3"
_RECEIVER = (
    "import json, sys; asked = json.loads(sys.stdin.readline()); scope = {}; "
    "exec(asked['program'], scope); scope['answer'](asked)"
)


def sync_code(hosts: Sequence[Host], options: HostsOptions, directory: Path) -> None:
    """Copy a directory to every host by rsync, into the host's working directory.

    What git ignores stays here, and so do `.git` and `runs`; what is on a host alone and isn't
    ignored is removed there, so that all have the same code.

    Args:
        hosts: Which; each with its working directory.
        options: How ssh reaches them.
        directory: Of this machine.

    Raises:
        UsageError: There is no rsync here.
        InfrastructureError: A copy failed; the message is rsync's own.
    """

    def sync(host: Host) -> None:
        _run(sync_command(host, options, directory), host, "rsync", _SYNC_S)

    _on_each(hosts, sync)


def sync_command(host: Host, options: HostsOptions, directory: Path) -> list[str]:
    """Write the rsync command for a host. Pure.

    Nothing of the paths is seen by a shell: `--secluded-args` sends them in the protocol.
    """
    target = (host.directory or "").removeprefix("~/")
    name = f"[{host.name}]" if ":" in host.name else host.name
    return [
        *("rsync", "--archive", "--compress", "--delete", "--mkpath", "--secluded-args"),
        *("--exclude=/.git", "--exclude=/runs", "--filter=:- .gitignore"),
        f"--rsh={shlex.join(ssh_words(host, options))}",
        "--",
        f"{directory}/",
        f"{name}:{target}/",
    ]


def install(hosts: Sequence[Host], options: HostsOptions) -> list[Host]:
    """Give every host a Python that has this Paceline.

    Where the host's Python has it, that is the one. Else an environment is made below
    `~/.cache/paceline`, by the host's own pip and its registry, and kept for the next time.

    Args:
        hosts: Which.
        options: How ssh reaches them.

    Returns:
        The hosts with their Python.

    Raises:
        InfrastructureError: It failed; the message has the end of what pip said.
    """
    name, wheel = build_wheel()
    program = files("paceline.launch.hosts").joinpath("installer.py").read_text()

    def bring(host: Host) -> Host:
        asked = {
            "program": program,
            "python": host.python or "",
            "version": __version__,
            "name": name,
            "wheel": base64.b64encode(wheel).decode(),
        }
        command = [*ssh_words(host, options), "--", host.name, receiver_command(host)]
        said = _run(command, host, "ssh", _INSTALL_S, json.dumps(asked) + "\n")
        return replace(host, python=_python_of(host, said))

    return _on_each(hosts, bring)


def receiver_command(host: Host) -> str:
    """Write what a host without Paceline runs: a program that comes through its input. Pure."""
    return shlex.join(["exec", host.python or _USUAL_PYTHON, "-c", _RECEIVER])


def _python_of(host: Host, said: str) -> str:
    answer = json.loads(said.strip().splitlines()[-1])
    if "error" in answer:
        raise InfrastructureError(f"{host.name}: Paceline can't be installed: {answer['error']}")
    return str(answer["python"])


def _on_each(hosts: Sequence[Host], work: Callable[[Host], T]) -> list[T]:
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return list(pool.map(work, hosts))


def _run(command: Sequence[str], host: Host, program: str, timeout_s: float, text: str = "") -> str:
    """Run a command that reaches a host, and give what it printed."""
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise UsageError(f"there is no {program} on this machine: install it") from None
    except subprocess.TimeoutExpired:
        raise InfrastructureError(f"{host.name}: {program} took over {timeout_s:g} s") from None
    if done.returncode:
        raise InfrastructureError(explain(host, done.returncode, done.stderr or done.stdout))
    return done.stdout
