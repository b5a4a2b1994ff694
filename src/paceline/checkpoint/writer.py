"""Writes snapshots in the background: training waits for a copy in memory, not for the disk."""

import contextlib
import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from paceline.checkpoint.format import HostSnapshot, Snapshot, copy_to_host
from paceline.checkpoint.host_tensors import HostTensors
from paceline.checkpoint.store import SnapshotStore
from paceline.options.figures import show_bytes

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_RETRY_EVERY_S = 0.5


@final
class SnapshotWriter:
    """Copies snapshots and publishes them on one thread of its own, one at a time.

    Used by the one worker that writes, from one thread. A failed write never stops the training.
    """

    def __init__(
        self,
        store: SnapshotStore,
        report: Callable[[str], None],
        on_written: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Start nothing yet: the thread starts with the first snapshot.

        Args:
            report: Called with one line per failed write, on the writer's thread.
            on_written: Called with the seconds of each that is written, on the writer's thread.
        """
        self._store = store
        self._report = report
        self._on_written = on_written
        self._memory: HostTensors | None = None
        self._in_flight: Future[None] | None = None
        self._failure = ""
        """Why the last snapshot offered couldn't be written at first."""
        self._unsaved: tuple[HostSnapshot, bool] | None = None
        self.written = self.skipped = 0
        """Snapshots published, and those left out because another was still being written."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="paceline-snapshots")

    def offer(self, snapshot: Snapshot, *, best: bool = False, wait: bool = False) -> bool:
        """Copy a snapshot to memory and queue it for writing; training may go on right after.

        Args:
            snapshot: Its tensors are copied (from CUDA: in stream order, without a host sync) and
                its state is encoded before this returns.
            wait: Where another is still being written, wait for it rather than skip this one. Best
                ones and the last one want this.

        Returns:
            False if it was skipped.

        Raises:
            TypeError, ValueError: As `copy_to_host`.
            Exception: A programming error that an earlier snapshot met on the thread.
        """
        if self._in_flight is not None and not self._in_flight.done() and not wait:
            self.skipped += 1
            return False
        # The memory is free again only when the last snapshot has been written.
        self.flush()
        host = copy_to_host(snapshot, reuse=self._memory)
        self._memory = host.tensors
        self._in_flight = self._thread.submit(self._publish, host, best)
        return True

    def flush(self) -> None:
        """Wait until what was offered is durable or has failed.

        Raises:
            Exception: A programming error met on the thread.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def save_last(self, limit_s: float, is_cut_short: Callable[[], bool]) -> str:
        """Wait as `flush`; where the last snapshot offered isn't on disk, try again for a while.

        Args:
            is_cut_short: Asked before every try but the first: whether to give up.

        Returns:
            Why it couldn't be written; empty where it is on disk, or none was offered.

        Raises:
            Exception: A programming error met on the thread.
        """
        self.flush()
        if self._unsaved is None:
            return ""
        if limit_s > 0:
            self._report(f"the last snapshot isn't on disk: trying again for {limit_s:.0f} s")
        # Publish on the writer's thread, as always, until it works or nobody wants to wait any
        # longer.
        deadline_s = time.monotonic() + limit_s
        reason = self._failure
        while self._unsaved and time.monotonic() < deadline_s and not is_cut_short():
            host, best = self._unsaved
            try:
                self._thread.submit(self._publish_now, host, best).result()
            except OSError as error:
                reason = self._explain(host, error)
                time.sleep(_RETRY_EVERY_S)
        return reason if self._unsaved else ""

    def close(self) -> None:
        """Wait as `flush` and end the thread; `offer` can't be called any more.

        Raises:
            Exception: A programming error met on the thread.
        """
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            self._memory = None
            self._store.drop_spares()

    def _publish(self, host: HostSnapshot, best: bool) -> None:
        # Kept until it is on disk, so that `save_last` can try again.
        self._unsaved = host, best
        try:
            self._publish_now(host, best)
        except OSError as error:
            self._failure = f"{self._explain(host, error)}; training goes on, {self._newest()}"
            self._report(self._failure)

    def _publish_now(self, host: HostSnapshot, best: bool) -> None:
        began_s = time.monotonic()
        self._store.publish(host, best=best)
        self._unsaved = None
        self._on_written(time.monotonic() - began_s)
        self.written += 1

    def _explain(self, host: HostSnapshot, error: OSError) -> str:
        reason = error.strerror or str(error)
        if error.errno in _NO_ROOM:
            reason += f" (needs {show_bytes(host.num_bytes)}{self._free()})"
        elif error.filename:
            reason += f" ({error.filename})"
        done = "marked as best or synced" if host.step in self._store.steps() else "written"
        return f"the snapshot of step {host.step} could not be {done}: {reason}"

    def _newest(self) -> str:
        steps = self._store.steps()
        return f"the newest good snapshot is step {steps[-1]}" if steps else "there is none yet"

    def _free(self) -> str:
        with contextlib.suppress(OSError):
            room = os.statvfs(self._store.directory)
            return f", {show_bytes(room.f_bavail * room.f_frsize)} free"
        return ""
