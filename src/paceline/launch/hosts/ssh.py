"""The ssh command of a host: OpenSSH with the user's own configuration, hardened. Pure."""

import re
import shlex
import sys
from pathlib import Path

from paceline.launch.hosts.hostfile import Host
from paceline.launch.hosts.options import HostsOptions

GUARD = "paceline.launch.hosts.guard"
_LOOPBACK = "127.0.0.1"
_FORWARDED = re.compile(r"Allocated port (\d+) for remote forward to")
_SETTINGS = {
    "BatchMode": "yes",  # never asks: there may be nobody to answer, or many hosts at once
    "ConnectTimeout": "10",
    "ServerAliveInterval": "3",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a connection of its own, whose end is the host's end
    "ControlPath": "none",
    "ExitOnForwardFailure": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "LogLevel": "INFO",  # the forwarded port is told at this level
}


def ssh_words(host: Host, options: HostsOptions) -> list[str]:
    """Write ssh's options for a host: all but the host itself and what to run there.

    What is said on the command line counts before the user's configuration.
    """
    words = ["ssh", "-T"]
    if options.ssh_config is not None:
        words += ["-F", str(Path(options.ssh_config).expanduser())]
    keys = "accept-new" if options.host_keys == "accept-new" else "yes"
    for name, value in {**_SETTINGS, "StrictHostKeyChecking": keys}.items():
        words += ["-o", f"{name}={value}"]
    if host.user is not None:
        words += ["-l", host.user]
    if host.port is not None:
        words += ["-p", str(host.port)]
    return words


def guard_command(host: Host, options: HostsOptions, store_port: int | None = None) -> list[str]:
    """Write the command that starts the guard on a host.

    Nothing that a user or a recipe says is in it but the path of Python: the rest goes through the
    guard's standard input.

    Args:
        host: Which one.
        options: How ssh reaches it.
        store_port: Port of this machine's loopback address that the host is to reach, if any, at a
            port of its own loopback address.
    """
    forward = []
    if store_port is not None:
        forward = ["-R", f"{_LOOPBACK}:0:{_LOOPBACK}:{store_port}"]
    remote = shlex.join(["exec", host.python or sys.executable, "-P", "-m", GUARD])
    return [*ssh_words(host, options), *forward, "--", host.name, remote]


def forwarded_port(line: str) -> int | None:
    """Read the port that ssh says it was given on the host; None for any other line."""
    found = _FORWARDED.search(line)
    return int(found[1]) if found else None


def explain(host: Host, code: int | None, said: str) -> str:
    """Say why a connection failed, with what to do.

    Args:
        host: Which one.
        code: Exit code of ssh; 255 for its own failures.
        said: The end of what it and the host wrote.
    """
    where = host.python or sys.executable
    for part, advice in _ADVICE.items():
        if part in said:
            return f"{host.name}: {advice.format(host=host.name, python=where)}"
    lines = [line for line in said.strip().splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it said nothing"
    return f"{host.name}: ssh ended with code {code}: {last}"


_ADVICE = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its host key has changed. If that is as it should be: ssh-keygen -R {host}, then connect "
        "once with ssh {host}"
    ),
    "Host key verification failed": (
        "its host key isn't known here. Connect once with ssh {host} and compare the fingerprint, "
        "or say --host-keys accept-new"
    ),
    "remote port forwarding failed": (
        "its ssh server forwards no ports: it needs AllowTcpForwarding yes (or remote)"
    ),
    "Permission denied": (
        "ssh isn't let in without a password: put your key there (ssh-copy-id {host}), or add it "
        "to your agent (ssh-add)"
    ),
    "No module named": (
        "{python} there has no Paceline. Install it, name another Python (python= in the "
        "hostfile), or say --install"
    ),
    "not found": "there is no {python} there. Name its Python by python= in the hostfile",
    "No such file": "there is no {python} there. Name its Python by python= in the hostfile",
    "Could not resolve": "the name isn't known here",
    "Connection timed out": "no answer. Is it up? Does a firewall close its ssh port?",
    "Connection refused": "nothing listens at its ssh port. Is an ssh server running?",
    "No route to host": "no route leads there",
    "Connection closed by": "it closed the connection",
}
