"""Launches the training that `paceline verify` looks at, again and again."""

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.distributed.environment import current_variables
from paceline.errors import UsageError
from paceline.launch.errors.failures import WorkerFailure, one_line
from paceline.launch.restart_policy import Policy
from paceline.launch.scratch import own_directory_is
from paceline.launch.worker_count import threads_per_worker, usable_cores
from paceline.options.command_line import note
from paceline.options.figures import plural
from paceline.results.run_directory import RunDirectory
from paceline.training.config import TrainConfig, TrainRequest
from paceline.verify.isolation.project_copy import ProjectCopy
from paceline.verify.launch_commands import (
    LaunchCommand,
    command_for,
    variables_for,
    with_workers,
)
from paceline.verify.options import VerifyOptions

if TYPE_CHECKING:
    from paceline.launch.local.launcher import LaunchOutcome
    from paceline.verify.trace import Trace

ENTRY = "paceline.script.verified:run_watched"
PRELOAD = ("paceline.script.verified", "torch._dynamo")
OBSERVED = "paceline.script.verified"
"""Runs a script in a worker that another launcher has started."""
_TIMEOUT_S = 120.0
_KEPT = ("copy", "t")
"""Directories of a launch: the copy of the project, and temporary files."""
_LAST_LINES = 20
_REFUSALS = ("Permission denied", "os error 13", "readonly database", "open database file")
_REFUSED_WRITES = (
    "If it was to write a file outside of the project, verify has refused that: give --writable DIR"
)


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """What is verified, and how."""

    training: TrainRequest
    config: TrainConfig
    workers: tuple[int, ...]
    options: VerifyOptions
    command: LaunchCommand | None = None
    """The user's own, by which workers are started; None: Paceline starts them."""


@dataclass(frozen=True, kw_only=True)
class LaunchPart:
    """What one of the launches is for."""

    name: str
    run: str = ""
    """Name of the run directory, where another launch has it, too; empty: one of its own."""
    is_disturbed: bool = False
    """Whether it is the yardstick, whose weights and gradients are disturbed by rounding."""
    kill_at: int = 0
    """Step after which all workers are killed; 0: none."""
    more_args: tuple[str, ...] = ()
    hash_seed: str = "0"
    """By which a command of the user's hashes text in it: Python draws another at each start.
    `paceline run` and `train` do not."""


_TRAINED = LaunchPart(name="trained")


@dataclass(frozen=True)
class VerifyLauncher:
    """Launches the training that is verified, again and again."""

    request: VerifyRequest
    place: Path
    on_cpu: bool

    @property
    def keeps_dropout(self) -> bool:
        """Whether the training promises the same dropout on any number of workers."""
        return self.request.config.data.shards is not None

    def launch(self, workers: int, part: LaunchPart = _TRAINED) -> "Trace":
        """Train on a number of workers, and read what they saw.

        Raises:
            UsageError: The workers say that the command is at fault.
            KeyboardInterrupt: A signal came.
        """
        from paceline.verify.events import Began, Stepped, read_events
        from paceline.verify.isolation.subprocesses import programs_started
        from paceline.verify.observing.deadlock_locations import lost_one_another, read_locations
        from paceline.verify.trace import Trace
        from paceline.verify.trial import record_path

        # Train in a directory of its own.
        run = RunDirectory.named(self.place / (part.run or f"{part.name}-{workers}"))
        # What a killed launch wrote is there again, at the same path as in every launch.
        if run.path.is_dir():
            _move_kept(run.path, self.place)
        else:
            run.create()
            self._make_copy()
        records = run.path / f"seen-{part.name}"
        records.mkdir()
        trial = self._trial(run, records, workers, part)
        started_s = time.monotonic()
        outcome = self._launched(trial, run, records, workers, part)
        took_s = time.monotonic() - started_s
        _move_kept(self.place, run.path)
        if outcome.interrupted:
            raise KeyboardInterrupt
        # Read what the workers saw, also where they failed or waited for one another.
        for file in records.iterdir():
            self._copy.name_originals(file)
        events = [read_events(record_path(records, r)) for r in range(workers)]
        places = read_locations(records, events)
        failures = tuple(map(self._with_originals, outcome.failures))
        if not (failures and lost_one_another(failures[0], places)):
            places = []
        taken = max(sum(isinstance(event, Stepped) for event in rank) for rank in events)
        failures = () if 0 < part.kill_at <= taken else failures
        failure = _explain(failures, self.request.training.reference, records, traceback=not places)
        began_s = [e.at_s for rank in events for e in rank if isinstance(e, Began)]
        trace = Trace(
            ranks=tuple(map(tuple, events)),
            failure=failure,
            locations=tuple(places),
            programs=tuple(programs_started(records)),
            took_s=took_s,
            starting_s=max(began_s) - started_s if began_s else took_s,
        )
        what = "disturbed: the yardstick" if part.is_disturbed else part.name
        note(f"{plural(workers, 'worker')}: {plural(len(trace.steps), 'step')} {what}")
        return trace

    def written(self, name: str) -> list[str]:
        """Name the files that launches with this run directory have written."""
        run = RunDirectory.named(self.place / name)
        copy = replace(self._copy, copy=str(run.path / "copy"))
        files = sorted(os.path.relpath(path) for path in copy.written())
        return [*files, *(f"snapshot {path.name}" for path in sorted(run.snapshots.glob("step-*")))]

    def _launched(
        self,
        trial: str,
        run: RunDirectory,
        records: Path,
        workers: int,
        part: LaunchPart,
    ) -> "LaunchOutcome":
        """Have workers started, by Paceline or by the user's command, and wait for their end."""
        from paceline.launch.local.forkserver import hash_seed_is, prepare
        from paceline.launch.local.launcher import launch_local
        from paceline.verify.observed_launch import run_observed

        threads, command = self.threads(workers), self.request.command
        # By the user's own command (torchrun, say), with the observer in front of the script.
        if command is not None and command.has_launcher:
            file = records / "trial.json"
            file.write_text(trial)
            words = command_for(command, workers, (OBSERVED, str(file)))
            variables = self._variables_of(command, workers, threads)
            return run_observed(
                words, variables, workers=workers, records=records, log_dir=run.logs
            )
        # By Paceline's own launcher.
        with hash_seed_is("0" if command is None else part.hash_seed):
            prepare(PRELOAD, threads)
            with own_directory_is(self.place):
                return launch_local(
                    ENTRY,
                    trial,
                    workers=workers,
                    threads=threads,
                    policy=Policy(),
                    log_dir=run.logs,
                    progress=lambda: -1,
                )

    def _variables_of(self, command: LaunchCommand, workers: int, threads: int) -> dict[str, str]:
        """Give the whole environment of a launching command."""
        from paceline.launch.local.attempt import environment

        own = dict(environment(threads)) | {"TMPDIR": str(self.place / "t")}
        given = variables_for(command, workers, on_cpu=self.on_cpu)
        return current_variables() | own | given

    def threads(self, workers: int) -> int:
        """Return a worker's threads: as of `paceline run`, or as torchrun sets for several."""
        variables, command = current_variables(), self.request.command
        if command is not None:
            default = {"OMP_NUM_THREADS": "1"} if command.has_launcher else {}
            given = variables_for(command, workers, on_cpu=self.on_cpu)
            variables = default | variables | given
        threads, omp = self.request.config.worker_threads, variables.get("OMP_NUM_THREADS")
        return threads_per_worker(threads, workers, usable_cores(), omp)

    @property
    def _copy(self) -> ProjectCopy:
        return ProjectCopy.around(Path.cwd(), self.place / "copy")

    def _make_copy(self) -> None:
        """Copy the project for a launch, and make its directory of temporary files."""
        for name in _KEPT:
            (self.place / name).mkdir()
        if self.holds_back:
            self._copy.make()

    def _with_originals(self, failure: WorkerFailure) -> WorkerFailure:
        named = self._copy.original
        message, traceback = named(failure.message), named(failure.traceback)
        return replace(failure, message=message, traceback=traceback)

    @property
    def holds_back(self) -> bool:
        """Whether there is code of the user's, which may write anything."""
        request = self.request.training
        return request.kind == "script" or not request.reference.startswith("paceline.")

    def _trial(self, run: RunDirectory, records: Path, workers: int, part: LaunchPart) -> str:
        from paceline.verify.trial import Trial

        command, variables = self.request.command, dict[str, str]()
        # Without a launcher the workers are ours, and set the command's variables themselves.
        if command is not None and not command.has_launcher:
            variables = variables_for(command, workers, on_cpu=self.on_cpu)
        given = (*self.request.training.script_args, *part.more_args)
        arguments = tuple(with_workers(word, workers) for word in given)
        request = replace(self.request.training, run_dir=str(run.path), script_args=arguments)
        more = {"progress": "off"}
        if request.kind == "recipe" and self.on_cpu:
            more["device"] = "cpu"
        request = replace(request, settings={**request.settings, **more})
        return Trial(
            request=request.to_json(),
            records=str(records),
            place=str(self.place),
            project=self._copy.project,
            copy=self._copy.copy if self.holds_back else "",
            directory=str(Path.cwd()),
            writable=[str(Path(d).expanduser().absolute()) for d in self.request.options.writable],
            steps=self.request.options.steps,
            disturbed=part.is_disturbed,
            keeps_dropout=self.keeps_dropout,
            on_cpu=self.on_cpu,
            timeout_s=self._timeout_s(),
            variables=variables,
            notes_state=self.request.options.resume,
            epochs=self.request.options.epochs,
            kill_at=part.kill_at,
            log_dir=str(run.logs),
        ).to_json()

    def _timeout_s(self) -> float:
        """Choose a shorter time-out than for trainings: a verification has few steps."""
        config = self.request.config
        return config.dist.timeout_s if "timeout_s" in self.request.training.given else _TIMEOUT_S


def _move_kept(source: Path, target: Path) -> None:
    for name in _KEPT:
        (source / name).rename(target / name)


def _explain(
    failures: Sequence[WorkerFailure], script: str, records: Path, *, traceback: bool
) -> str:
    """Give the cause of a failed launch in a line; its traceback may go to standard error.

    Raises:
        UsageError: The command is at fault, not the script.
    """
    if not failures:
        return ""
    cause = failures[0]
    if cause.kind == "usage":
        raise UsageError(cause.message)
    if traceback:
        parts = [cause.traceback.strip("\n"), *_last_output(records, cause.rank)]
        if "--writable" not in cause.traceback:
            parts += [_REFUSED_WRITES] * any(word in cause.traceback for word in _REFUSALS)
        print(*filter(None, parts), sep="\n", file=sys.stderr, flush=True)
    return one_line(cause) + _line_of_script(cause.traceback, script)


def _line_of_script(traceback: str, script: str) -> str:
    """Name the last line of the script itself that a traceback goes through."""
    lines = traceback.splitlines()
    for number in reversed(range(len(lines))):
        found = re.match(rf'  File "{re.escape(script)}", line (\d+)', lines[number])
        if found:
            code = lines[number + 1].strip() if number + 1 < len(lines) else ""
            return f" (line {found[1]} of {Path(script).name}: {code})"
    return ""


def _last_output(records: Path, rank: int) -> list[str]:
    """Show what the script itself has said last, which may explain its failure."""
    from paceline.verify.trial import output_path

    path = output_path(records, rank)
    lines = path.read_text(errors="replace").splitlines()[-_LAST_LINES:] if path.exists() else []
    return [f"The last of what the script printed on rank {rank}:", *(f"  {x}" for x in lines)] * (
        len(lines) > 0
    )
