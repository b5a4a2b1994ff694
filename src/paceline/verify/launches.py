"""Launches the training that `paceline verify` looks at, again and again."""

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from paceline.verify.isolation.landlock import landlock_version
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
_OVERLAY = "overlay"
_LAST_LINES = 20
_REFUSALS = ("Permission denied", "os error 13")
_REFUSED_WRITES = (
    "If it was refused to write a file: verify keeps what Python code writes in a directory of its "
    "own, and has the kernel refuse what C code and other programs write elsewhere. Leave that "
    "out where PACELINE_VERIFIED_WORKER is set, or write it by Python's open()."
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
        from paceline.verify.events import Began, read_events
        from paceline.verify.isolation.subprocesses import programs_started, refused
        from paceline.verify.observing.deadlock_locations import lost_one_another, read_locations
        from paceline.verify.trace import Trace
        from paceline.verify.trial import record_path

        # Train in a directory of its own.
        run = RunDirectory.named(self.place / (part.run or f"{part.name}-{workers}"))
        if not run.path.is_dir():
            run.create()
        records = run.path / f"seen-{part.name}"
        records.mkdir()
        trial = self._trial(run, records, workers, part)
        started_s = time.monotonic()
        outcome = self._launched(trial, run, records, workers, part)
        took_s = time.monotonic() - started_s
        if outcome.interrupted:
            raise KeyboardInterrupt
        if refusal := refused(records):
            raise UsageError(refusal)
        # Read what the workers saw, also where they failed or waited for one another.
        events = [read_events(record_path(records, r)) for r in range(workers)]
        places = read_locations(records, events)
        if not (outcome.failures and lost_one_another(outcome.failures[0], places)):
            places = []
        failures = () if part.kill_at else outcome.failures
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
        overlay = run.path / _OVERLAY / "files"
        paths = [f"/{p.relative_to(overlay)}" for p in sorted(overlay.rglob("*")) if p.is_file()]
        named = (os.path.relpath(path) for path in paths)
        return [*named, *(f"snapshot {path.name}" for path in sorted(run.snapshots.glob("step-*")))]

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
            command = replace(command, arguments=(*command.arguments, *part.more_args))
            file = records / "trial.json"
            file.write_text(trial)
            words = command_for(command, workers, (OBSERVED, str(file)))
            variables = self._variables_of(command, workers, threads)
            with self._report_changes():
                return run_observed(
                    words,
                    variables,
                    workers=workers,
                    records=records,
                    log_dir=run.logs,
                )
        # By Paceline's own launcher.
        with hash_seed_is("0" if command is None else part.hash_seed):
            prepare(PRELOAD, threads)
            with own_directory_is(self.place), self._report_changes():
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

        scratch = self.place / "t"  # where its workers keep what is temporary, too
        scratch.mkdir(exist_ok=True)
        own = dict(environment(threads)) | {"TMPDIR": str(scratch)}
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

    @contextmanager
    def _report_changes(self) -> Iterator[None]:
        """Report the user's files that a script has changed, where the kernel can't forbid it."""
        from paceline.verify.isolation.file_isolation import changes, files_below

        if self.confines or not self.holds_back:
            yield
            return
        places = dict.fromkeys((Path.cwd(), Path(self.request.training.reference).parent))
        before = [files_below(place) for place in places]
        yield
        after = [files_below(place) for place in places]
        for path in (p for pair in zip(before, after, strict=True) for p in changes(*pair)):
            note(f"WARNING: the script has changed {path}: C code or another program wrote it")

    @property
    def holds_back(self) -> bool:
        """Whether there is code of the user's, which may write anything."""
        request = self.request.training
        return request.kind == "script" or not request.reference.startswith("paceline.")

    @property
    def confines(self) -> bool:
        """Whether the kernel can forbid workers to write."""
        return landlock_version() > 0

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
            place=str(self.place) if self.holds_back else "",
            confines=self.confines,
            steps=self.request.options.steps,
            disturbed=part.is_disturbed,
            keeps_dropout=self.keeps_dropout,
            on_cpu=self.on_cpu,
            timeout_s=self._timeout_s(),
            variables=variables,
            overlay=str(run.path / _OVERLAY),
            notes_state=self.request.options.resume,
            epochs=self.request.options.epochs,
            kill_at=part.kill_at,
            log_dir=str(run.logs),
        ).to_json()

    def _timeout_s(self) -> float:
        """Choose a shorter time-out than for trainings: a verification has few steps."""
        config = self.request.config
        return config.dist.timeout_s if "timeout_s" in self.request.training.given else _TIMEOUT_S


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
