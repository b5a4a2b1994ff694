"""Python programs that run in processes forked from this one: torch is imported in them already.

A test of what a command does needn't wait for its imports. Such a process is a child like any other
(its id, its session, its signals, its exit code, its files); its fork server is forked as well.
"""

import atexit
import importlib
import inspect
import logging
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any, NoReturn

from paceline.launch.local import forkserver as ours
from paceline.runtime.spec import PRELOAD
from tests.launch.waiting import patient

for _module in PRELOAD:  # as the fork server of a training does
    importlib.import_module(_module)

_DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
_HEEDED = (signal.SIGINT, *_DEFAULT_SIGNALS)
_LIMIT_S = 120.0
_ALIVE = "_forkserver_alive_fd"
_SERVER = "multiprocessing.forkserver"
_SERVER_CHILD = "paceline.launch.local.forkserver_child"


class WarmPython(subprocess.Popen[str]):
    """Popen of `[sys.executable, "-m", module, ...]` or `[sys.executable, script, ...]`."""

    def _execute_child(self, *given: object) -> None:
        names = inspect.signature(subprocess.Popen._execute_child).parameters  # type: ignore[attr-defined]
        said: dict[str, Any] = dict(zip(list(names)[1:], given, strict=True))
        sys.stdout.flush()
        sys.stderr.flush()
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)
        pid = os.fork()
        if pid == 0:
            _leave(lambda: _be_program(said, held))
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*(said[name] for name in _PIPES))  # type: ignore[attr-defined]


def run_warm(
    words: Sequence[str], directory: Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a Python program to its end.

    Args:
        words: As for WarmPython.
        directory: Where it runs.
        environment: Variables beside those of this process.

    Raises:
        subprocess.TimeoutExpired: It took too long, and was killed.
    """
    with WarmPython(
        words,
        cwd=directory,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=patient(_LIMIT_S))
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


_ENDS = ("p2cread", "c2pwrite", "errwrite")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _be_program(said: Mapping[str, Any], held: Iterable[int]) -> None:
    """Be the program, as if the interpreter had just begun.

    Args:
        said: What Popen was given, by its names.
        held: The signals that are to be blocked; more are until now.
    """
    ends = {number: said[name] for number, name in enumerate(_ENDS) if said[name] != -1}
    for number, end in ends.items():
        os.dup2(end, number)
    for end in set(ends.values()):
        os.close(end)
    if said["start_new_session"]:
        os.setsid()
    os.chdir(said["cwd"])
    os.environ.clear()
    os.environ.update(said["env"])
    tempfile.tempdir = None  # it is looked up anew
    _forget_the_test()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    more = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = more.split(os.pathsep) if more else []
    words = said["args"][1:]
    sys.orig_argv = [sys.executable, *words]
    if words[0] == "-m":
        sys.argv = [words[1], *words[2:]]
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*words]
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        runpy.run_path(words[0], run_name="__main__")


def _leave(run: Callable[[], None]) -> NoReturn:
    code: object = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
        code = 1
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0)


def _forget_the_test() -> None:
    """Undo what the test runner and the test's own fork server have left in this process."""
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    for number in _DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    _usual_warnings()
    _forget_processes()
    util.spawnv_passfds = _spawn


def _usual_warnings() -> None:
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")

    def show(message: object, category: type[Warning], name: str, line: int, *_: object) -> None:
        sys.stderr.write(warnings.formatwarning(str(message), category, name, line))

    warnings.showwarning = show  # type: ignore[assignment]


def _forget_processes() -> None:
    """Have no child, and no helper of multiprocessing: those are the test's.

    Other files of the test stay open: libuv, in torch, closes its own by their numbers at a fork,
    and those could be another file's by then.
    """
    atexit._clear()
    atexit.register(util._exit_function)  # type: ignore[attr-defined]
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    vars(multiprocessing.process.current_process())["_config"].pop("tempdir", None)
    for held in (resource_tracker._resource_tracker, "_fd"), (forkserver._forkserver, _ALIVE):
        if (descriptor := vars(held[0])[held[1]]) is not None:
            os.close(descriptor)
    for fresh, old in (
        (resource_tracker.ResourceTracker(), resource_tracker._resource_tracker),
        (forkserver.ForkServer(), forkserver._forkserver),
    ):
        vars(old).update(vars(fresh))
    ours._running.clear()


_spawn_for_real = util.spawnv_passfds


def _spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Fork the fork server of a warm program; start everything else as ever."""
    if _SERVER not in args[-1]:
        return int(_spawn_for_real(path, args, passfds))
    pid = os.fork()
    if pid == 0:
        _forget_processes()
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.modules.pop(_SERVER_CHILD)  # imported by the server, it ties that to its launcher
        _leave(lambda: exec(args[-1], {"__name__": "__main__"}))
    return pid
