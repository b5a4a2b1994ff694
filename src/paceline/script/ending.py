"""Ends a session: by its `with` block, by `close`, or else when its process ends."""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Literal, final

from paceline.errors import InterruptedTraining, StorageError, UsageError
from paceline.options.text import printable
from paceline.training.session import Session


@final
class OpenSession:
    """The session of this process, from its beginning to its end."""

    def __init__(self, context: AbstractContextManager[Session], session: Session) -> None:
        """Create the open session.

        Args:
            context: Closed when the session ends; has been entered.
            session: What it gave.
        """
        self._context = context
        self._session = session
        self._pid = os.getpid()
        self._hook, self._exit = sys.excepthook, sys.exit
        self._left_by: SystemExit | None = None
        """What the script's `sys.exit` has raised."""
        self._left_loop = False
        """Whether it did so within its loop over epochs or steps."""
        sys.exit = self._note_exit  # type: ignore[assignment]  # called alike

    def end_with_process(self) -> None:
        """Have the session end with the process, if nothing ends it before."""
        sys.excepthook = self._failed
        # Before threads are shut down, which atexit's functions come after: snapshots need one.
        threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]  # as concurrent.futures does

    def end(self, error: BaseException | None) -> None:
        """End the session. Collective where nothing went wrong; does nothing for a second time.

        Args:
            error: What ended the script; None, or an exit with code 0, where it came to its end.
        """
        if self not in _open or os.getpid() != self._pid:
            return  # it has ended before; or this is a process that the script has forked
        # One of several workers that leaves its loop so is a failure: the others would wait for it.
        is_early = self._left_loop and self._session.world_size > 1
        if isinstance(error, SystemExit) and error.code in (None, 0) and not is_early:
            error = None
        # First, so that a second call does nothing.
        _open.remove(self)
        _ended.append(self._session.engine.begun)
        ends_with_process = sys.excepthook == self._failed
        # The process has its own hooks back, whatever closing raises.
        sys.excepthook, sys.exit = self._hook, self._exit
        try:
            if error is None:
                self._context.__exit__(None, None, None)
            else:
                self._context.__exit__(type(error), error, error.__traceback__)
        except StorageError:
            if ends_with_process:
                sys.excepthook = partial(_show, self._hook)
            raise

    def _failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End the session before Python says what ended the script (its hook for exceptions)."""
        hook = self._hook
        try:
            self.end(error)
        except BaseException as raised:  # noqa: BLE001  # the same again as a rule
            if raised is not error:
                kind, error, trace = type(raised), raised, raised.__traceback__
        _show(hook, kind, error, trace)

    def _note_exit(self, code: object = None) -> None:
        """Stand in for `sys.exit`: when the process ends, nothing else tells how."""
        self._left_by, self._left_loop = SystemExit(code), self._session.is_in_loop
        self._exit(code)  # type: ignore[arg-type]  # as it takes anything

    def _at_exit(self) -> None:
        # atexit isn't told why the process ends: a signal, `sys.exit`, or the script's last line.
        progress = self._session.engine.context.progress
        is_open = self._session.engine.epoch.is_open  # where the stop has waited for an update
        stopped = progress.stopping == "signal" and progress.state.ended is None and not is_open
        error = InterruptedTraining() if stopped else self._left_by
        try:
            self.end(error)
        except BaseException as raised:  # noqa: BLE001  # nobody else would tell, nor end with 1
            if raised is error:
                return
            code = 1
            if isinstance(raised, StorageError):
                code = _show_storage_error(raised)
            else:
                traceback.print_exception(raised)
            # os._exit flushes nothing; and only it can still change the exit code here.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


@final
class RunDirectoryNamed(BaseException):  # not an error, and no script may swallow it
    """The script names a run directory, and the launcher starts the workers again in it."""

    def __init__(self, run_dir: str, *, resume: bool | Literal["auto"]) -> None:
        self.run_dir, self.resume = run_dir, resume


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
"""As Python calls `sys.excepthook`."""


def _show(
    hook: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Say what ended the script: by a hook for exceptions, but a full disk without a traceback.

    Raises:
        SystemExit: It was that; the exit code says that another try may work. Python takes this
            from a hook.
    """
    if isinstance(error, StorageError):
        raise SystemExit(_show_storage_error(error))
    hook(kind, error, trace)


def _show_storage_error(error: StorageError) -> int:
    print(f"paceline: {printable(str(error))}", file=sys.stderr, flush=True)
    return int(error.exit_code)


# A process has one session at a time, and one run directory from its launcher: as global as these.
_open: list[OpenSession] = []
_ended: list[bool] = []
"""Of each session that has ended: whether its training had begun."""


def has_opened() -> bool:
    """Tell whether this process has, or had, a session."""
    return bool(_open or _ended)


def check_no_other(*, own_run_dir: bool) -> None:
    """Refuse a second session beside one that hasn't ended, or in the same run directory.

    Args:
        own_run_dir: Whether each session makes a run directory, rather than the launcher one.

    Raises:
        UsageError: There is one.
    """
    if any(_ended) and not own_run_dir:
        raise UsageError(
            "this process has trained in its run directory already, and a second session would go "
            "on with that training. A script with several sessions, one for each fold of a cross "
            "validation, is started by torchrun or python, where each has a run directory of its "
            "own: paceline.session(run_dir=f'runs/fold-{fold}')"
        )
    if _open:
        raise UsageError(
            "this process has a session that hasn't ended: end it by s.close(), or use it as "
            "`with paceline.session() as s:`"
        )


def opened(context: AbstractContextManager[Session], *, ends_with_process: bool) -> Session:
    """Open a session, and see to it that it ends.

    Args:
        ends_with_process: Whether the process's end ends it; otherwise the caller of the script
            does, by `ended_with_its_block`.
    """
    session = context.__enter__()
    one = OpenSession(context, session)
    _open.append(one)
    session.ends_by(one.end)
    if ends_with_process:
        one.end_with_process()
    return session


@contextmanager
def ended_with_its_block() -> Iterator[None]:
    """End the session that is opened in this block and left open, as the block ends."""
    try:
        yield
    except BaseException as error:
        for one in list(_open):
            one.end(error)
        raise
    for one in list(_open):
        one.end(None)
