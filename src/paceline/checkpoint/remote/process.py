"""The process that copies beside a training: it can neither slow nor stop that.

It looks at the run directory, and is told over its standard input when the training is over; its
end closes that, whatever ended it. What a store that hangs leaves of it is replaced by a new one.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal, final

from paceline.checkpoint.remote.copier import RunCopier, TakenError
from paceline.checkpoint.remote.record import CopyRecord
from paceline.checkpoint.remote.store import RemoteStore, open_store
from paceline.checkpoint.remote.url import reason_of
from paceline.errors import UsageError
from paceline.files import write_json
from paceline.launch.signals import STOP_SIGNALS
from paceline.options.text import print_stderr
from paceline.results.run_directory import RunDirectory

FINISH, RELEASE = "finish", "release"
STALLED_S = 120.0
"""Without a byte more, after which a store counts as hanging."""
_NICER = 10
_POLL_S = 0.5
_FILES_S = 30.0
_MAX_RETRY_S, _AGAIN_AT_END_S = 60.0, 2.0
_REPORT_AGAIN_S = 600.0


@dataclass(frozen=True, kw_only=True)
class CopySpec:
    """Arguments of the copying process."""

    run_dir: str
    record: CopyRecord
    keep_last: int
    is_new: bool
    """Whether the training begins with this start: then a store that fails is told, and no more."""
    stalled_s: float = STALLED_S
    stalls: int = 0
    """How often the store has hung in a row; the process replaced itself then."""
    reported_s: float = float("-inf")
    """When a failure was last told, by `time.monotonic`."""

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CopySpec":
        """Read what `to_json` wrote."""
        content = json.loads(text)
        return cls(**content | {"record": CopyRecord(**content["record"])})


Message = Literal["ready", "refused", "failed", "finished"]


class UnfitError(UsageError):
    """The store can't be opened here at all: something isn't installed, or not configured."""


def send(kind: Message, text: str = "") -> None:
    """Tell the process that started this one."""
    with suppress(OSError):
        print(json.dumps({"kind": kind, "text": text}), flush=True)


@final
class Orders:
    """Receives the training process's commands on a thread; ends this process with that one."""

    def __init__(self) -> None:
        self.given: str | None = None
        self._arrived = threading.Event()
        threading.Thread(target=self._receive, daemon=True).start()

    def wait(self, limit_s: float) -> None:
        """Wait until there is an order, at most so long."""
        self._arrived.wait(limit_s)

    def _receive(self) -> None:
        with suppress(OSError):
            while piece := os.read(0, 64).decode():
                self.given = piece.strip()
                self._arrived.set()
        os._exit(0)


@final
class CopyProcess:
    """Copies until the training is over and everything is there."""

    def __init__(self, spec: CopySpec) -> None:
        """Start to listen, and to watch for a store that hangs."""
        self._spec = spec
        self._run = RunDirectory.named(spec.run_dir)
        self._orders = Orders()
        self._active_s = time.monotonic()
        self._is_busy = False
        self._reported_s = spec.reported_s
        self._copier: RunCopier | None = None
        self._record = spec.record
        threading.Thread(target=self._watch, daemon=True).start()

    def main(self) -> int:
        """Open the store, copy, and say how it ended. Returns the exit code."""
        failures, files_s = self._spec.stalls, float("-inf")
        # A process that replaces one that hung waits as long as that one would have.
        if failures:
            self._orders.wait(_again_s(failures))
        while True:
            order = self._orders.given
            if order == RELEASE:
                return self._release()
            files_due = order == FINISH or time.monotonic() - files_s >= _FILES_S
            try:
                self._is_busy = True
                self._note_activity()
                self._copy_once(files=files_due, is_last=order == FINISH)
            except (TakenError, UnfitError) as error:
                return self._give_up(error, failures)
            except Exception as error:  # noqa: BLE001  # a store's library may raise anything
                if self._copier is None and self._spec.is_new:
                    return self._give_up(error, failures)
                # Anything else may pass: try again, later each time.
                failures += 1
                self._note_failure(error, failures)
                if self._copier is None:
                    send("failed")
                self._pause(_again_s(failures), order)
                continue
            finally:
                self._is_busy = False
            if failures:
                self._print_line("goes on again")
            failures, files_s = 0, time.monotonic() if files_due else files_s
            if order == FINISH:
                send("finished")
                return 0
            self._pause(_POLL_S, order)

    def _pause(self, limit_s: float, order: str | None) -> None:
        """Wait for the next try; until there is an order, unless that was there before."""
        if order is None:
            self._orders.wait(limit_s)
        else:
            time.sleep(min(limit_s, _AGAIN_AT_END_S))

    def _copy_once(self, *, files: bool, is_last: bool) -> None:
        # Opening the store and claiming the place are a part of the first copy.
        copier = self._copier
        if copier is None:
            store = self._opened()
            copier = RunCopier(self._run, store, self._record, self._spec.keep_last)
            copier.claim()
            self._copier = copier
            self._keep(replace(copier.record, takes_over=None))
            send("ready")
        copier.copy(files=files, is_last=is_last)
        # The summary goes last: where it is, everything is.
        if is_last:
            copier.record = replace(copier.record, complete=True)
            note_in_summary(self._run, copier.record)
            copier.copy_summary()
        self._keep(copier.record)

    def _opened(self) -> RemoteStore:
        try:
            return open_store(self._record.url, self._note_activity)
        except UsageError as error:
            raise UnfitError(str(error)) from error

    def _keep(self, record: CopyRecord) -> None:
        """Write the record where it has changed."""
        if self._copier is not None:
            self._copier.record = record
        if record != self._record:
            self._record = record
            record.write(self._run)

    def _release(self) -> int:
        with suppress(Exception):  # nothing was copied, and nobody waits for it
            if self._copier is not None:
                self._copier.release()
        return 0

    def _give_up(self, error: Exception, failures: int) -> int:
        """Copy nothing more; the training's process says why, if it still waits for the store."""
        if self._copier is None and not failures:
            reason = str(error) if isinstance(error, UsageError) else reason_of(error)
            send("refused", reason)
        else:
            self._note_failure(error, 0)
        return 2

    def _note_failure(self, error: Exception, failures: int) -> None:
        known = self._copier.record if self._copier is not None else self._record
        reason = reason_of(error)
        self._keep(replace(known, failures=known.failures + 1, last_failure=reason, complete=False))
        now_s = time.monotonic()
        if failures in (0, 1) or now_s - self._reported_s >= _REPORT_AGAIN_S:
            self._reported_s = now_s
            then = "the training goes on"
            if failures:
                then += f", copying is tried again (after {_again_s(failures):.0f} s, then rarer)"
            self._print_line(f"failed: {reason}; {then}")

    def _print_line(self, text: str) -> None:
        print_stderr(f"paceline: copying to {self._record.url} {text}")

    def _note_activity(self) -> None:
        self._active_s = time.monotonic()

    def _watch(self) -> None:
        """Replace this process by a new one where the store hangs: a thread can't be ended."""
        limit_s = self._spec.stalled_s
        while True:
            time.sleep(min(1.0, limit_s / 4))
            idle_s = time.monotonic() - self._active_s
            # At the end of the training its own process has a limit.
            if not self._is_busy or idle_s < limit_s or self._orders.given is not None:
                continue
            stalls = self._spec.stalls + 1
            known = self._copier.record if self._copier is not None else self._record
            reason = f"the store hasn't answered for {idle_s:.0f} s"
            record = replace(known, failures=known.failures + 1, last_failure=reason)
            if stalls == 1 or time.monotonic() - self._reported_s >= _REPORT_AGAIN_S:
                self._reported_s = time.monotonic()
                self._print_line(f"failed: {reason}; the training goes on, copying is tried again")
            record.write(self._run)
            again = replace(
                self._spec, record=record, is_new=False, stalls=stalls, reported_s=self._reported_s
            )
            os.execv(sys.executable, [*command(), again.to_json()])


def command() -> list[str]:
    """The words that start the process, before its `CopySpec`."""
    return [sys.executable, "-P", "-m", "paceline.checkpoint.remote"]


def note_in_summary(run: RunDirectory, record: CopyRecord) -> None:
    """Add to `summary.json`, where there is one, how far the copies came."""
    with suppress(OSError, ValueError):
        write_json(run.summary_json, run.read_summary() | {"copy": record.for_summary()})


def _again_s(failures: int) -> float:
    return float(min(2**failures, _MAX_RETRY_S))


def main(text: str) -> int:
    """Be the process: signals are the training's, whose end ends this as well."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICER)
    return CopyProcess(CopySpec.from_json(text)).main()
