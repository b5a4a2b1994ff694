"""Imported first in the fork server: makes the server and its workers end with the launcher.

The server lives as long as any process holds its pipe, and every worker does; without this, workers
would outlive a launcher that was killed. It ignores signals to stop, its workers must not. It also
never collects garbage: it only imports, which leaves none to speak of, and a sixth of that time
would go into looking for it. Workers do, but not among what was imported: that they share with it.
"""

import gc
import os
import signal
import sys
from multiprocessing import synchronize
from types import TracebackType

from paceline.launch.process_tree import die_with_parent
from paceline.launch.signals import STOP_SIGNALS

LAUNCHER_VARIABLE = "PACELINE_FORK_SERVER_OF"
"""Environment variable that holds the launcher's process id; set for the fork server alone."""

if _launcher := os.environ.pop(LAUNCHER_VARIABLE, ""):
    die_with_parent(int(_launcher))
    for _number in STOP_SIGNALS:  # blocked when it was started
        signal.signal(_number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    gc.disable()
    _server = os.getpid()

    def _become_worker() -> None:
        if os.getppid() == _server:  # workers inherit this, and fork as well
            die_with_parent(_server)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            gc.freeze()
            gc.enable()
            sys.excepthook = _print_unless_given_up

    def _print_unless_given_up(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print no error of a start that the launcher gave up: its semaphores are gone then."""
        last = trace
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        where = last.tb_frame.f_code.co_filename if last is not None else ""
        if not (kind is FileNotFoundError and where == synchronize.__file__):
            sys.__excepthook__(kind, error, trace)

    os.register_at_fork(after_in_child=_become_worker)
