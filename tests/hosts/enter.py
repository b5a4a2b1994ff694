"""Runs a command inside of a host: `enter.py PID-OF-INIT DIRECTORY COMMAND...`.

The command is a child in the host's namespaces; signals are passed on to it, it dies with this
process, and this process ends as it does. So whoever started this may treat it as the command.
"""

import ctypes
import os
import resource
import signal
import sys

_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mnt uts ipc pid net
_PR_SET_PDEATHSIG = 1
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_AWAITED = (*_PASSED_ON, signal.SIGCHLD)


def main() -> None:
    process, directory, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(process), _NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), f"can't enter the host of process {process}")
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    child = os.fork()
    if child == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # a parent outside of the host is 0; this one has died already
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.chdir(directory)
        os.execvp(command[0], command)
    _end_as(_wait(child))


def _wait(child: int) -> int:
    while True:
        number = signal.sigwait(_AWAITED)  # a handler could miss what comes just before a wait
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _end_as(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
