"""With shards, a script runs with a fixed number of CPU threads from its first line.

Whatever it computes before its session (a model's first weights, say) would otherwise depend on the
cores that its worker has, and so on the number of workers.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from types import FrameType

import torch

from paceline.distributed.environment import (
    current_variables,
    launcher_request,
    thread_variables,
    threads_from_start,
)
from paceline.errors import UsageError
from paceline.options.figures import plural
from paceline.training.config import TrainConfig


def pin_from_start(config: TrainConfig, caller: FrameType) -> None:
    """Start the script's process again, with the right number of threads, if it has another one.

    Args:
        caller: The frame that opens the session.

    Raises:
        UsageError: It can't be started again from here; says how to start it.
    """
    threads = config.worker_threads
    if config.data.shards is None or threads is None or _is_pinned(threads):
        return
    script = Path(sys.argv[0] or "SCRIPT").name
    # Under a launcher, or with an obstacle, only the user can start it otherwise.
    if launcher_request() is not None:
        remedy = f"give it on the command line: paceline run {script} --shards {config.data.shards}"
        raise UsageError(_explain(config, threads, remedy))
    obstacle = _obstacle(caller)
    if obstacle:
        remedy = f"start it with OMP_NUM_THREADS={threads} (it can't be started anew: {obstacle})"
        raise UsageError(_explain(config, threads, remedy))
    print(
        f"paceline: starting {script} anew with {plural(threads, 'CPU thread')}, which --shards "
        f"needs from its first line on; OMP_NUM_THREADS={threads} in the environment saves this",
        file=sys.stderr,
    )
    # exec replaces the process without flushing.
    sys.stdout.flush()
    sys.stderr.flush()
    again = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, again, current_variables() | thread_variables(threads))


def _is_pinned(threads: int) -> bool:
    """Tell whether this process has had as many threads from its beginning."""
    if threads_from_start():
        return True  # by the launcher, or when it was started anew
    requested = current_variables().get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return requested == str(threads) == str(torch.get_num_threads())


def _explain(config: TrainConfig, threads: int, remedy: str) -> str:
    return (
        f"the session has shards={config.data.shards}, and the script has run with "
        f"{plural(torch.get_num_threads(), 'CPU thread')} until here instead of {threads}: what it "
        "has computed, such as a model's first weights, may have other bits on another number of "
        f"workers. To fix the threads from its first line, {remedy}"
    )


def _obstacle(caller: FrameType) -> str:
    """Say why this process can't be replaced by a new one that runs the same; '' if it can."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if os.name != "posix":
        return "this isn't a POSIX system"
    if caller.f_globals.get("__name__") != "__main__":
        return "the session is opened by a module that is imported, not by the main program"
    if file is None or not Path(sys.argv[0]).exists() or not Path(file).samefile(sys.argv[0]):
        return "it isn't a file that Python was started with, or the directory was changed"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "it has a process group already"
    if "mpi4py.MPI" in sys.modules:
        return "it has begun to use MPI"
    return "it has started processes" if multiprocessing.active_children() else ""
