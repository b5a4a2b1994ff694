"""How a session ends that no `with` block ends: by `close`, with its block, or with the process."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import final

from paceline.errors import InterruptedTraining, UsageError
from paceline.trainer.session import Session


@final
class OpenSession:
    """The session of this process, from its beginning to its end."""

    def __init__(self, context: AbstractContextManager[Session], session: Session) -> None:
        """Args:
        context: Closed when the session ends; has been entered.
        session: What it gave.
        """
        self._context = context
        self._session = session
        self._pid = os.getpid()
        self._hook, self._exit = sys.excepthook, sys.exit
        self._code: object = None
        """What the script has called `sys.exit` with."""

    def heed_the_process(self) -> None:
        """Have the session end with the process, if nothing ends it before."""
        sys.excepthook, sys.exit = self._failed, self._note_exit  # type: ignore[assignment]  # called alike
        atexit.register(self._at_exit)

    def end(self, error: BaseException | None) -> None:
        """End the session. Collective where nothing went wrong; does nothing for a second time.

        Args:
            error: What ended the script, if it didn't come to its end.
        """
        if self not in _open:
            return
        _open.remove(self)
        atexit.unregister(self._at_exit)
        sys.excepthook, sys.exit = self._hook, self._exit
        if error is None:
            self._context.__exit__(None, None, None)
        else:
            self._context.__exit__(type(error), error, error.__traceback__)

    def _failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End the session before Python says what ended the script (its hook for exceptions)."""
        hook = self._hook
        try:
            self.end(error)
        except BaseException as raised:  # noqa: BLE001  # the same again as a rule, or one on top
            error = raised
        hook(type(error), error, error.__traceback__)

    def _note_exit(self, code: object = None) -> None:
        """Stand in for `sys.exit`: when the process ends, nothing else tells how."""
        self._code = code
        self._exit(code)  # type: ignore[arg-type]  # as it takes anything

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a process that the script has forked
        if self._session.engine.course.stopping == "signal":
            self._end_quietly(InterruptedTraining())
        elif self._code in (None, 0):
            self.end(None)
        else:
            self._end_quietly(SystemExit(self._code))

    def _end_quietly(self, error: BaseException) -> None:
        """End the session by what ends the process in any case."""
        try:
            self.end(error)
        except type(error):
            return


_open: list[OpenSession] = []  # a process has one session at most, so this is as global as it


def check_no_other() -> None:
    """Refuse a second session beside one that hasn't ended.

    Raises:
        UsageError: There is one.
    """
    if _open:
        raise UsageError(
            "this process has a session that hasn't ended: end it by s.close(), or use it as "
            "`with paceline.session() as s:`"
        )


def opened(context: AbstractContextManager[Session], *, ends_with_process: bool) -> Session:
    """Open a session, and see to it that it ends.

    Args:
        context: Gives the session.
        ends_with_process: Whether the process's end ends it; otherwise the caller of the script
            does, by `ended_with_its_block`.
    """
    session = context.__enter__()
    one = OpenSession(context, session)
    _open.append(one)
    session.ends_by(one.end)
    if ends_with_process:
        one.heed_the_process()
    return session


@contextmanager
def ended_with_its_block() -> Iterator[None]:
    """End the session that is opened in this block and left open, as the block ends."""
    try:
        yield
    except BaseException as error:
        went_well = isinstance(error, SystemExit) and error.code in (None, 0)
        for one in list(_open):
            one.end(None if went_well else error)
        raise
    for one in list(_open):
        one.end(None)
