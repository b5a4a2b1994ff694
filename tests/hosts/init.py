"""Process 1 of a host: makes the host's own mounts and name, then starts and ends what it is told.

Run by `unshare` as a program of its own. Commands are lines of JSON on standard input; each is
answered by a line. When its input ends, because the test that owns the rig closed it or died, it
ends too, and the kernel kills every process of the host with it.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

_PRIVATE = ("/run", "/dev/shm", "/media")


def main() -> None:
    settings = json.loads(sys.argv[1])
    socket.sethostname(settings["name"])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    _mount(Path(settings["hosts"]), Path(settings["empty"]), Path(settings["home"]))
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    _answer("ready")
    for line in sys.stdin:
        _obey(*json.loads(line))
        _answer("done")


def _mount(hosts: Path, empty: Path, home: Path) -> None:
    # A new /sys shows this host's interfaces; the control groups are laid over it again.
    groups = Path("/sys/fs/cgroup")
    kept = [str(path) for path in sorted(groups.iterdir())] if groups.is_dir() else []
    mount = ("mount", "-t")
    for place in _PRIVATE:
        subprocess.run([*mount, "tmpfs", "tmpfs", place], check=True)
    Path("/run/sshd").mkdir(mode=0o755)
    if kept:
        Path("/run/groups").mkdir()
        subprocess.run(["mount", "--rbind", str(groups), "/run/groups"], check=True)
    subprocess.run([*mount, "sysfs", "sysfs", "/sys"], check=True)
    if kept:
        subprocess.run(["mount", "--move", "/run/groups", str(groups)], check=True)
    subprocess.run(["mount", "--bind", str(hosts), "/etc/hosts"], check=True)
    if (home / ".ssh").is_dir():
        subprocess.run([*mount, "tmpfs", "tmpfs", str(home / ".ssh")], check=True)
    if (home / ".bashrc").exists():  # it is read for every command by ssh
        subprocess.run(["mount", "--bind", str(empty), str(home / ".bashrc")], check=True)


def _obey(verb: str, *arguments: str) -> None:
    if verb == "start":
        _start(*arguments)
    elif verb == "signal":  # from process 1, -1 is every process of the host but itself
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, int(arguments[0]))
    else:
        raise ValueError(f"unknown command: {verb}")


def _start(log: str, *command: str) -> None:
    with Path(log).open("ab") as output:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
        ]
        os.posix_spawn(command[0], command, os.environ, file_actions=actions, setsid=True)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(word: str) -> None:
    print(word, flush=True)


if __name__ == "__main__":
    main()
