"""A background thread that runs tasks one after another."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import final

_END_S = 2.0
"""How long the end waits for what is under way: where a worker fails, the others may never come."""


@final
class WorkerThread:
    """Runs tasks in the order in which they are given, on a thread of its own."""

    def __init__(self, name: str) -> None:
        """Start the thread; `end` ends it.

        Args:
            name: Of the thread.
        """
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None] | None] | None]
        self._tasks = queue.SimpleQueue()
        # A daemon: what it waits for may never come, and the process must be able to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def send(self, task: Callable[[], None]) -> Future[None]:
        """Queue a task. Doesn't block; the result raises what the task has raised.

        Waiting for it needs no timeout: a collective has one of its own.
        """
        done: Future[None] = Future()
        self._tasks.put((task, done))
        return done

    def post(self, task: Callable[[], None]) -> None:
        """Queue a task without a result. Doesn't block; an error ends the thread."""
        self._tasks.put((task, None))

    def end(self) -> bool:
        """End the thread after all queued tasks; gives up where that takes too long.

        Returns:
            Whether it has ended.
        """
        self._tasks.put(None)
        self._thread.join(_END_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (given := self._tasks.get()) is not None:
            task, done = given
            try:
                task()
            except BaseException as error:
                if done is None:
                    raise
                done.set_exception(error)
            else:
                if done is not None:
                    done.set_result(None)
            del given, task, done  # no tensor is kept until the next task
