"""The ssh command of a host: OpenSSH with the user's own configuration, hardened. Pure."""

import re
import shlex
import sys
from pathlib import Path

from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions

AGENT = "paceline.launch.hosts.guard"
"""Of every version: a host with another one is to say so."""
AGENT_HERE = (sys.executable, "-P", "-m", AGENT)
"""The command of an agent on this machine."""
OWN_FAILURE = 255
"""Exit code of ssh for its own failures; any other is that of what ran on the host."""
NO_PROGRAM = (126, 127)
"""Exit codes of a shell that can't run a program, or finds none."""
_LOOPBACK = "127.0.0.1"
_NOT_FORWARDED = re.compile(r"remote port forwarding failed for listen port 0\b")
_FORWARDED = re.compile(r"Allocated port (\d+) for remote forward to")
_SETTINGS = {
    "BatchMode": "yes",  # never asks: there may be nobody to answer, or many hosts at once
    "ConnectTimeout": "10",
    "ServerAliveInterval": "3",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # a connection of its own, whose end is the host's end
    "ControlPath": "none",
    "ExitOnForwardFailure": "no",  # the user's own may be taken; for ours see forwarding_failed
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "LogLevel": "INFO",  # ssh prints the forwarded port at this level
}


def ssh_command(host: Host, options: HostsOptions) -> list[str]:
    """Write ssh's options for a host: all but the host itself and what to run there.

    What is said on the command line counts before the user's configuration.
    """
    command = ["ssh", "-T"]
    if options.ssh_config is not None:
        command += ["-F", str(Path(options.ssh_config).expanduser())]
    keys = "accept-new" if options.host_keys == "accept-new" else "yes"
    for name, value in {**_SETTINGS, "StrictHostKeyChecking": keys}.items():
        command += ["-o", f"{name}={value}"]
    if host.user is not None:
        command += ["-l", host.user]
    if host.port is not None:
        command += ["-p", str(host.port)]
    return command


def plain_ssh_command(host: Host, options: HostsOptions) -> list[str]:
    """Write ssh's options for a connection that forwards nothing, whatever the user's are."""
    return [*ssh_command(host, options), "-o", "ClearAllForwardings=yes"]


def agent_command(host: Host, options: HostsOptions, store_port: int | None = None) -> list[str]:
    """Write the command that starts the agent on a host.

    Nothing that a user or a recipe says is in it but the path of Python: the rest goes through the
    agent's standard input.

    Args:
        store_port: Port of this machine's loopback address that the host is to reach, if any, at a
            port of its own loopback address.
    """
    command = plain_ssh_command(host, options)
    if store_port is not None:
        forward = f"{_LOOPBACK}:0:{_LOOPBACK}:{store_port}"
        command = [*ssh_command(host, options), "-R", forward]
    remote = shlex.join(["exec", host.python or sys.executable, "-P", "-m", AGENT])
    return [*command, "--", host.name, remote]


def forwarded_port(line: str) -> int | None:
    """Read the port that ssh says it was given on the host; None for any other line."""
    match = _FORWARDED.search(line)
    return int(match[1]) if match else None


def forwarding_failed(line: str) -> bool:
    """Tell whether ssh says that the host lets it forward no port to this machine's store.

    A forward of the user's own that fails, to a port that was named, is none of ours.
    """
    return _NOT_FORWARDED.search(line) is not None


def explain(
    host: Host,
    code: int | None,
    output: str,
    python: str | None = None,
    config: str | None = None,
) -> str:
    """Say why a connection failed, with what to do.

    Args:
        code: Exit code of ssh; None where it hasn't ended.
        output: The end of what it and the host wrote.
        python: The Python that was to be run there; None: the agent's.
        config: Configuration file that ssh was given.
    """
    ssh = "ssh" if config is None else shlex.join(["ssh", "-F", config])
    where = python or host.python or sys.executable
    advice = _advice(code, output)
    if advice:
        return f"{host.name}: {advice.format(host=host.name, python=where, ssh=ssh)}"
    if code is None:
        return f"{host.name}: the connection ended: {last_lines(output, 1)}"
    program = f"{where} there" if 0 <= code < OWN_FAILURE else "ssh"
    return f"{host.name}: {program} ended with code {code}: {last_lines(output, 1)}"


def last_lines(output: str, count: int = 3) -> str:
    """Give the last lines of what a program said, as one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return "; ".join(lines[-count:]) or "it said nothing"


def _advice(code: int | None, output: str) -> str:
    if any(map(forwarding_failed, output.splitlines())):
        return "its ssh server forwards no ports: it needs AllowTcpForwarding yes (or remote)"
    if code in NO_PROGRAM:
        return (
            "there is no {python} there that can be run. Name its Python by python= in the hostfile"
        )
    if code in (None, OWN_FAILURE):
        return next((advice for part, advice in _OF_SSH.items() if part in output), "")
    if _NO_PACELINE.search(output):
        return (
            "{python} there has no Paceline. Install it, name another Python (python= in the "
            "hostfile), or say --install"
        )
    return ""


_NO_PACELINE = re.compile(r"No module named '?paceline\b")
_OF_SSH = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its host key has changed. If that is as it should be: ssh-keygen -R {host}, then connect "
        "once with {ssh} {host}"
    ),
    "Host key verification failed": (
        "its host key isn't known here. Connect once with {ssh} {host} and compare the "
        "fingerprint, or say --host-keys accept-new"
    ),
    "Permission denied (": (
        "ssh isn't let in without a password: put your key there (ssh-copy-id {host}), or add it "
        "to your agent (ssh-add)"
    ),
    "Could not resolve": (
        "the name isn't known here. Is it misspelt in --hosts or the hostfile? Your ssh "
        "configuration can say what it stands for"
    ),
    "Connection timed out": "no answer. Is it up? Does a firewall close its ssh port?",
    "Connection refused": "nothing listens at its ssh port. Is an ssh server running?",
    "No route to host": "no route leads there",
    "Connection closed by": "it closed the connection",
}
