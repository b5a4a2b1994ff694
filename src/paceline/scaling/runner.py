"""Runs the measurements of a study one after the other, and keeps the result of each.

A study is its directory: `measured/NAME.json` holds what a measurement came to, `runs/NAME` its run
directory, `trained/NAME` a whole training. What is there already isn't measured again.
"""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, final

from paceline.errors import ExitCode, UsageError
from paceline.files import writing
from paceline.gradient_sync.options import SyncMethod
from paceline.options.durations import format_duration
from paceline.options.figures import plural, show_milliseconds
from paceline.results.run_directory import RunDirectory
from paceline.results.study import Measured, Mode, Trained
from paceline.scaling.measurement import read_measured, read_whole
from paceline.scaling.plan import (
    ENDED_FROM_OUTSIDE,
    Measurement,
    Size,
    global_batch_of,
)
from paceline.scaling.subprocess_runner import (
    PROGRAM,
    CommandResult,
    InterruptedStudyError,
    run_command,
)

_STARTING_S = 10.0
"""What starting and ending a training takes, until it is known."""
_OVERHEAD_LIMIT_S = 1800.0
"""For starting, the first step, evaluation and the end of a measurement."""
_FACTOR = 3.0
_SHOW_S = 60.0


class CommandWriter(Protocol):
    """Writes the commands of a study, without the word `paceline`."""

    def measure(self, size: Size, run_dir: Path, batch: int | None) -> Sequence[str]:
        """Write the command of a measurement.

        Args:
            batch: The global batch; None: as the script has it.
        """

    def train(self, size: Size, run_dir: Path, batch: int | None) -> Sequence[str]:
        """Write the command of a whole training; arguments as for `measure`."""

    def resume(self, size: Size, run_dir: Path) -> Sequence[str]:
        """Write the command that goes on with a whole training."""

    def remove_snapshots(self, size: Size, run_dir: Path) -> None:
        """Remove a measurement's snapshots from other hosts; arguments as for `measure`."""


@final
@dataclass(kw_only=True)
class Runner:
    """Measures what is missing of a study."""

    place: Path
    """The study's directory."""
    commands: CommandWriter
    mode: Mode
    seconds: float
    batch: int | None
    """Of one worker; None where a script settles it: then it is that of the first measurement."""
    own_batch: bool
    """Whether a script that settles its own batch may do so on any number of workers."""
    print_line: Callable[[str], None]
    keep: Callable[[], None]
    """Called whenever there is something new."""
    program: Sequence[str] = PROGRAM
    """What the commands' words are for."""
    failures: list[int] = field(default_factory=list)
    """Exit codes of what failed this time."""
    problems: list[str] = field(default_factory=list)
    """Of whole trainings."""
    _failed_sizes: set[Size] = field(default_factory=set)

    def measured(self, plan: Sequence[Measurement]) -> dict[Size, list[Measured]]:
        """Read what there is."""
        measured: dict[Size, list[Measured]] = {}
        for measurement in plan:
            record = Measured.read(self._record(measurement))
            if record is not None:
                measured.setdefault(measurement.size, []).append(record)
        return measured

    def trained(self, sizes: Sequence[Size]) -> dict[Size, Trained]:
        """Read the whole trainings that have ended."""
        results = {size: self._trained(size) for size in sizes}
        return {size: trained for size, trained in results.items() if trained is not None}

    def measure(self, plan: Sequence[Measurement]) -> None:
        """Measure what is missing. Blocks.

        Raises:
            UsageError: One plain worker can't be measured as the command says.
            InterruptedStudyError: A signal came.
        """
        missing = [m for m in plan if not self._is_there(m)]
        if len(missing) < len(plan):
            self.print_line(
                f"{len(plan) - len(missing)} of {len(plan)} measurements are there already"
            )
        for number, measurement in enumerate(missing):
            if measurement.size in self._failed_sizes:
                continue
            # Without the sizes that would fail again: the time that is left is counted by these.
            left = [m for m in missing[number:] if m.size not in self._failed_sizes]
            self.print_line(self._what(measurement, len(plan) - len(left) + 1, len(plan), left))
            record = self._measure(measurement)
            self._refuse_own_batch(measurement.size, record)
            # Written at once: a study that is interrupted goes on after the last measurement.
            record.write(self._record(measurement))
            self.print_line(f"      {_result(record)}")
            self._handle_failure(measurement.size, record)
            self.keep()

    def train(self, sizes: Sequence[Size]) -> None:
        """Train what hasn't been trained to its end. Blocks.

        Raises:
            InterruptedStudyError: A signal came.
        """
        for number, size in enumerate(sizes, 1):
            if self._trained(size) is not None or not self._knows_batch(size):
                continue
            what = f"{plural(size.workers, 'worker')}, {size.method}"
            self.print_line(f"[{number}/{len(sizes)}] training on {what}")
            ended = self._train(size)
            if ended.problem is not None:
                self.failures.append(ended.exit_code)
                self.problems.append(f"The training on {what} failed: {ended.problem}")
                self.print_line(f"      failed: {ended.problem}")
            self.keep()

    def _is_there(self, measurement: Measurement) -> bool:
        record = Measured.read(self._record(measurement))
        return record is not None and record.problem is None

    def _what(self, m: Measurement, number: int, of: int, left: Sequence[Measurement]) -> str:
        size = m.size
        known = [r.wall_s for r in self._records() if r.problem is None]
        each_s = sum(known) / len(known) if known else self.seconds + _STARTING_S
        return (
            f"[{number}/{of}] {plural(size.workers, 'worker')}, {size.method}, round {m.round}; "
            f"{len(left)} left, about {format_duration(each_s * len(left))}"
        )

    def _measure(self, measurement: Measurement) -> Measured:
        size, name = measurement.size, f"runs/{measurement.name}"
        run = RunDirectory.named(self.place / name)
        if not self._knows_batch(size):
            problem = "the batch of a worker isn't known, since one alone couldn't be measured"
            return Measured(run_dir=name, exit_code=ExitCode.JOB, problem=problem)
        shutil.rmtree(run.path, ignore_errors=True)  # of an attempt that failed or was broken off
        command = [*self.program, *self.commands.measure(size, run.path, self._batch(size))]
        ended = train_for(self.seconds, command, run, self._log(name), size.method)
        self.commands.remove_snapshots(size, run.path)
        return read_ended(ended, run, name, size.method)

    def _refuse_own_batch(self, size: Size, record: Measured) -> None:
        """Refuse a script whose batch can't grow with the workers, before anything is kept.

        Raises:
            UsageError: It is one.
        """
        if size.workers == 1 and record.script_batch is not None and not self.own_batch:
            raise UsageError(_own_batch(record.script_batch))

    def _handle_failure(self, size: Size, record: Measured) -> None:
        """Stop the study, or skip the size from now on, depending on how a measurement failed.

        Raises:
            UsageError: They would all fail alike.
        """
        if record.problem is None:
            return
        self.failures.append(record.exit_code)
        if record.exit_code == ExitCode.USAGE and size.workers == 1:
            raise UsageError(record.problem)
        if record.exit_code != ExitCode.INFRASTRUCTURE:
            self._failed_sizes.add(size)  # it would fail again

    def _train(self, size: Size) -> CommandResult:
        name = f"trained/{size.name}"
        run = RunDirectory.named(self.place / name)
        command = train_or_resume(self.commands, size, run, self._batch(size))
        return run_command(
            [*self.program, *command], self._log(name), None, self._progress_reporter(run)
        )

    def _progress_reporter(self, run: RunDirectory) -> Callable[[], bool]:
        """Print the progress of a long training from time to time."""
        shown_s, shown = time.monotonic(), ""

        def poll() -> bool:
            """Print the newest epoch, once a minute at most; never ends the training."""
            nonlocal shown_s, shown
            if time.monotonic() - shown_s > _SHOW_S:
                shown_s, line = time.monotonic(), _last_line(run.metrics_csv)
                if line != shown and line[:1].isdecimal():
                    shown = line
                    epoch, step, time_s = line.split(",")[:3]
                    self.print_line(
                        f"      epoch {epoch}, step {step}, {format_duration(float(time_s))}"
                    )
            return False

        return poll

    def _trained(self, size: Size) -> Trained | None:
        name = f"trained/{size.name}"
        return read_whole(RunDirectory.named(self.place / name), name)

    def _knows_batch(self, size: Size) -> bool:
        return size.workers == 1 or self.mode == "strong" or self._base() is not None

    def _batch(self, size: Size) -> int | None:
        base = self.batch if size.workers == 1 or self.mode == "strong" else self._base()
        return None if base is None else global_batch_of(self.mode, base, size.workers)

    def _base(self) -> int | None:
        """Give the batch of one worker, where it is known by now."""
        if self.batch is not None:
            return self.batch
        alone = (r.profile for r in self._records() if r.profile and r.profile.world_size == 1)
        return next((profile.global_batch for profile in alone), None)

    def _records(self) -> Sequence[Measured]:
        records = (
            Measured.read(path) for path in sorted(folder_in(self.place, "measured").glob("*.json"))
        )
        return [record for record in records if record is not None]

    def _record(self, measurement: Measurement) -> Path:
        return folder_in(self.place, "measured") / f"{measurement.name}.json"

    def _log(self, name: str) -> Path:
        return folder_in(self.place, "logs") / f"{name.replace('/', '-')}.log"


def train_for(
    seconds: float, command: Sequence[str], run: RunDirectory, log: Path, method: SyncMethod
) -> CommandResult:
    """Have a command train for some seconds, and remove its snapshots. Blocks.

    Args:
        seconds: Of training; the command has the option for it already.
        method: Its `--sync`: one that refuses a time budget is stopped from here.

    Raises:
        InterruptedStudyError: A signal came; nothing is left of the training.
    """
    clock = time_is_over(run, seconds) if method in ENDED_FROM_OUTSIDE else lambda: False
    try:
        ended = run_command(command, log, _FACTOR * seconds + _OVERHEAD_LIMIT_S, clock)
    except InterruptedStudyError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    shutil.rmtree(run.snapshots, ignore_errors=True)  # measurements are never resumed
    return ended


def train_or_resume(
    commands: CommandWriter, size: Size, run: RunDirectory, batch: int | None
) -> Sequence[str]:
    """Write the command of a whole training: its beginning, or its rest where one was broken off.

    What is left of an attempt that made no run is removed.
    """
    if run.run_json.exists():
        return commands.resume(size, run.path)
    shutil.rmtree(run.path, ignore_errors=True)
    return commands.train(size, run.path, batch)


def folder_in(place: Path, name: str) -> Path:
    """Give a folder of a study's directory, which is made where it isn't there."""
    directory = place / name
    with writing(directory):
        directory.mkdir(exist_ok=True)
    return directory


def read_ended(ended: CommandResult, run: RunDirectory, name: str, method: SyncMethod) -> Measured:
    """Read what a training has come to that has ended; arguments as for `read_measured`."""
    if ended.problem is None:
        return read_measured(run, name, ended.wall_s, method)
    return Measured(
        run_dir=name, exit_code=ended.exit_code, problem=ended.problem, wall_s=ended.wall_s
    )


def time_is_over(run: RunDirectory, seconds: float) -> Callable[[], bool]:
    """Make what tells whether a training has gone on for so many seconds."""
    begun_s: float | None = None

    def is_over() -> bool:
        """Count from when `run.json` is first there: starting is no part of it."""
        nonlocal begun_s
        if begun_s is None and run.run_json.exists():
            begun_s = time.monotonic()
        return begun_s is not None and time.monotonic() - begun_s > seconds

    return is_over


def exit_code_of(measured: Mapping[Size, Sequence[Measured]], failures: Sequence[int]) -> int:
    """Give a study's exit code: where nothing at all was measured, that of what failed."""
    if any(record.profile for records in measured.values() for record in records):
        return ExitCode.DONE
    codes = [r.exit_code for records in measured.values() for r in records if r.exit_code]
    return next(iter((*failures, *codes)), ExitCode.JOB)


def _result(record: Measured) -> str:
    if record.problem is not None:
        return f"failed: {record.problem}"
    step_ms = show_milliseconds(record.step_s or 0)
    return f"{record.images_per_s or 0:,.0f} images/s, {step_ms} ms a step"


def _last_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").splitlines()[-1]
    except (OSError, IndexError):
        return ""


def _own_batch(batch: int) -> str:
    return (
        f"the script settles its own global batch of {batch}, so that workers share it and none "
        "has the same on any number of workers. Say --mode strong; or take the batch out of the "
        "script and give --batch-per-worker; or hand it over as an argument of the script: "
        "--batch-per-worker 32 -- --batch {global_batch}"
    )
