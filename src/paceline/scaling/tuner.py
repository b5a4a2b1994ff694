"""Tries changes of a training, in pairs of short trials beside the training as it is.

A tuning is its directory: `measured/NAME.json` holds what a trial came to, `runs/NAME` its run
directory, `quality/NAME` a whole training. What is there already isn't tried again.
"""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from paceline.errors import InfrastructureError, JobError, PacelineError, UsageError
from paceline.launch.worker_count import usable_cores
from paceline.options.durations import format_duration
from paceline.options.fields import OptionValue
from paceline.options.figures import listed as in_words
from paceline.results.json_object import number, section, text, whole
from paceline.results.run_directory import RunDirectory
from paceline.results.study import Measured
from paceline.scaling.measurement import read_whole
from paceline.scaling.plan import Size
from paceline.scaling.runner import CommandWriter, folder_in, read_ended, train_for, train_or_resume
from paceline.scaling.subprocess_runner import PROGRAM, run_command
from paceline.scaling.tuning import (
    PAIRS,
    Change,
    Facts,
    Gain,
    Tried,
    advise_on_data,
    best_together,
    list_changes,
    together,
)

USUAL = Change(name="usual", settings={}, kind="same bits")
"""The training as it is."""
_MAX_PAIRS = 8
_MIN_STEPS = 5
"""In a trial: the first one of a training, which warms up, is none by which it is measured."""
_SEEDS = (0, 1, 2)
_MAX_TRAINING_S = 24 * 3600.0


@final
@dataclass(frozen=True, kw_only=True)
class TunedTraining:
    """The training as it is."""

    name: str
    """The recipe or the script."""
    given: Mapping[str, OptionValue]
    """Options that the user has settled, but for the number of workers."""
    fixed: frozenset[str]
    """Names of all that is settled."""
    known: frozenset[str]
    """Names of the options that it has."""
    commands: Callable[[Mapping[str, OptionValue], float], CommandWriter]
    """Makes what writes commands, from options and the seconds of a trial."""
    size: Size
    batch: int | None
    """Its global batch; None where a script settles it."""


@final
@dataclass(kw_only=True)
class Tuner:
    """Runs trials as commands of their own, and keeps what each came to."""

    place: Path
    """The tuning's directory."""
    training: TunedTraining
    budget_s: float
    seconds: float
    """Of training in a trial."""
    check_quality: bool
    print_line: Callable[[str], None]
    program: Sequence[str] = PROGRAM
    """What the commands' words are for."""
    tried: list[Tried] = field(default_factory=list)
    confirmed: Tried | None = None
    """What is to be taken, measured again by trials of its own."""
    usual: list[float] = field(default_factory=list)
    """Samples a second of the training as it is, one a trial."""
    advice: str | None = None
    """What else could make it faster."""
    _begun_s: float = field(default_factory=time.monotonic)
    _starting_s: float = 0.0
    """The most that a trial took beyond its seconds."""

    def run(self) -> None:
        """Try everything, as far as the time goes.

        Raises:
            PacelineError: The training as it is can't be measured; with its exit code.
            InterruptedStudyError: A signal came.
        """
        # 1. Measure the training as it is: what may be changed, and how long a trial has to be.
        first = self._trial(USUAL, 0, "first")
        training = self.training
        if first.problem is not None:
            raise _kind_of(first)(f"{training.name} can't be measured: {first.problem}")
        facts = self._facts(first)
        self.seconds = max(self.seconds, _MIN_STEPS * (first.step_s or 0.0))
        if training.batch is not None:
            self.training = replace(training, batch=facts.global_batch)
        # 2. List the changes that apply to it.
        self.advice = advise_on_data(facts)
        changes = [
            change
            for change in list_changes(facts, training.fixed)
            if training.known >= change.settings.keys()
        ]
        self.tried = [Tried(change=change) for change in changes]
        self.print_line(
            f"Tunes {training.name}: {first.images_per_s:,.0f} samples/s as it is on "
            f"{facts.workers} x {facts.threads} threads; {len(self.tried)} changes to try in "
            f"{format_duration(self.budget_s)}, {format_duration(self.seconds)} a trial and "
            f"{format_duration(self._starting_s)} to start it, in {self.place}"
        )
        # 3. Try all that are still open, again and again, in pairs; then confirm the best.
        for turn in range(1, _MAX_PAIRS + 1):
            self._try_all(turn)
        self._conclude()

    def _try_all(self, turn: int) -> None:
        """Try each change that isn't settled once, two around a trial of the training as it is."""
        open_ones = [place for place, each in enumerate(self.tried) if _is_open(each, turn)]
        for begin in range(0, len(open_ones), 2):
            neighbours = open_ones[begin : begin + 2]
            affordable = [place for place in neighbours if self._has_time(place, neighbours)]
            changes = [self.tried[place].change for place in affordable]
            gains = [self.tried[place].gain for place in affordable]
            for place, gain in zip(affordable, self._compare(changes, gains, turn), strict=True):
                self.tried[place] = replace(self.tried[place], gain=gain)

    def _has_time(self, place: int, neighbours: Sequence[int]) -> bool:
        """Tell whether a change can be tried, and what is taken in the end be confirmed."""
        each_s = self.seconds + self._starting_s
        more_s = self._more_s(self.tried[place].change, self.tried[place].gain)
        may_gain = any(tried.gain.ratios and tried.gain.mean > 1 for tried in self.tried)
        confirming_s = self._confirming_s() if may_gain else 0.0
        return (len(neighbours) + 1) * each_s + more_s + confirming_s < self._left_s()

    @property
    def turn_s(self) -> float:
        """What the shortest turn takes: two changes beside the training as it is."""
        return 3 * (self.seconds + self._starting_s)

    def _confirming_s(self) -> float:
        return 2 * PAIRS * (self.seconds + self._starting_s)

    def _left_s(self) -> float:
        """Give what is left of the budget."""
        return self.budget_s - (time.monotonic() - self._begun_s)

    def _conclude(self) -> None:
        """Judge results where asked to, and confirm what may be taken: all of it, or the best."""
        if self.check_quality:
            for place, tried in enumerate(self.tried):
                if tried.gain.is_faster and tried.change.kind == "quality":
                    self.tried[place] = self._with_quality(tried)
        chosen = best_together(self.tried)
        if chosen:
            self._confirm(chosen)
        is_confirmed = self.confirmed is not None and self.confirmed.is_recommended
        if len(chosen) > 1 and not is_confirmed and self._left_s() > self._confirming_s():
            self._confirm(chosen[:1])

    def _confirm(self, chosen: Sequence[Tried]) -> None:
        """Measure the best again: chosen as the best of many, it was in part lucky."""
        change = together([tried.change for tried in chosen])
        # What may change the result has been judged, one by one.
        self.confirmed = Tried(change=replace(change, kind="rounding"))
        gain = Gain(starting_s=max((tried.gain.starting_s for tried in chosen), key=sum))
        for turn in range(1, PAIRS + 1):
            (gain,) = self._compare([change], [gain], turn, "confirm-")
            self.confirmed = replace(self.confirmed, gain=gain)

    def _compare(
        self, changes: Sequence[Change], gains: Sequence[Gain], turn: int, prefix: str = ""
    ) -> list[Gain]:
        """Try changes next to the training as it is; the other way round in every second turn."""
        if not changes:
            return []
        # Next to each other in time: a machine whose speed drifts then slows both alike.
        order = [changes[0], USUAL, *changes[1:]]
        name = prefix + "+".join(change.name for change in changes)
        names = in_words([change.name for change in changes])
        self.print_line(f"  tries {names} beside the training as it is, pair {turn}")
        # Changes that take longer to start get longer trials.
        seconds = {c.name: self._more_s(c, g) for c, g in zip(changes, gains, strict=True)}
        trials = {
            which.name: self._trial(
                which,
                turn,
                f"usual-{name}" if which is USUAL else prefix + which.name,
                seconds.get(which.name, 0.0),
            )
            for which in (order if turn % 2 else reversed(order))
        }
        # A change's gain is its speed over that of the trial beside it.
        usual = trials.pop(USUAL.name)
        if usual.images_per_s:
            self.usual.append(usual.images_per_s)
        return [
            self._gain(change, gain, usual, trials[change.name])
            for change, gain in zip(changes, gains, strict=True)
        ]

    def _gain(self, change: Change, gain: Gain, usual: Measured, changed: Measured) -> Gain:
        # Without its counterpart a trial of the change says nothing.
        if usual.problem is not None and changed.problem is None:
            self.print_line(
                f"  {change.name}: the training as it is failed beside it: {usual.problem}"
            )
            return gain
        problem = changed.problem or _other_training(usual, changed)
        if problem or not usual.images_per_s or not changed.images_per_s:
            self.print_line(f"  {change.name}: {problem or 'it trained no step'}")
            return replace(gain, problem=problem or "it trained no step")
        # What a change costs once at its start (compiling, say) counts apart from its speed.
        starting_s = self._lost_s(changed) - self._lost_s(usual)
        new = gain.with_pair(usual.images_per_s, changed.images_per_s, starting_s)
        low, high = new.bounds
        bounds = f", 95 % bounds {low:.2f} to {high:.2f}" if len(new.ratios) > 1 else ""
        self.print_line(f"  {change.name}: {new.ratios[-1]:.2f} x, mean {new.mean:.2f}{bounds}")
        return new

    def _more_s(self, change: Change, gain: Gain) -> float:
        """Give the seconds that a trial needs at its start: those it needed the first time."""
        return min(change.more_s, max(gain.starting_s)) if gain.starting_s else change.more_s

    def _trial(self, change: Change, turn: int, name: str, more_s: float = 0.0) -> Measured:
        """Train for some seconds, if that hasn't been done before.

        Args:
            more_s: Beyond the usual seconds.
        """
        record = folder_in(self.place, "measured") / f"{name}-{turn}.json"
        measured = Measured.read(record)
        seconds = self.seconds + max(0.0, more_s)
        if measured is None or measured.problem is not None:
            measured = self._train_for(change, f"{name}-{turn}", seconds)
            measured.write(record)
        self._starting_s = max(self._starting_s, measured.wall_s - seconds)
        return measured

    def _train_for(self, change: Change, name: str, seconds: float) -> Measured:
        run = RunDirectory(folder_in(self.place, "runs") / name)
        log = folder_in(self.place, "logs") / f"{name}.log"
        size, given = self._as_changed(change)
        commands = self.training.commands(given, seconds)
        shutil.rmtree(run.path, ignore_errors=True)  # of an attempt that failed or was broken off
        command = commands.measure(size, run.path, self.training.batch)
        ended = train_for(seconds, [*self.program, *command], run, log, size.method)
        commands.remove_snapshots(size, run.path)
        return read_ended(ended, run, str(run.path.relative_to(self.place)), None)

    def _as_changed(self, change: Change) -> tuple[Size, Mapping[str, OptionValue]]:
        """Give a change's size, and the other options with it."""
        given = {**self.training.given, **change.settings}
        if "cuda_graphs" in self.training.known:
            given.setdefault("cuda_graphs", "off")  # trials are too short for a recipe's auto
        size = self.training.size
        workers, sync = given.pop("workers", size.workers), given.get("sync", size.method)
        assert isinstance(workers, int)
        assert isinstance(sync, str)
        return replace(size, workers=workers, method=sync), given

    def _facts(self, first: Measured) -> Facts:
        profile = first.profile
        assert profile is not None  # it was measured
        description = RunDirectory(self.place / first.run_dir).read_run()
        derived = section(description, "derived")
        return Facts(
            device=profile.device,
            nodes=self.training.size.nodes,
            workers=profile.world_size,
            threads=first.threads or 1,
            cores=usable_cores(),
            global_batch=profile.global_batch,
            waits_for_data=profile.parts.data / max(profile.step_s.median, 1e-9),
            sync=profile.sync,
            loader_workers=whole(derived, "script_loader_workers"),
            channels_last=text(derived, "memory_format") == "channels-last",
            batchnorm_per_worker=derived.get("batchnorm_per_worker") is True,
            settings=section(description, "settings"),
        )

    def _lost_s(self, record: Measured) -> float:
        """Give the time of a trial that its steps don't explain: its first ones are slow."""
        try:
            summary = RunDirectory(self.place / record.run_dir).read_summary()
        except (OSError, ValueError, UsageError):
            return 0.0
        steps, train_s = whole(summary, "steps"), number(summary, "train_time_s")
        if steps is None or train_s is None or record.step_s is None:
            return 0.0
        return max(0.0, train_s - steps * record.step_s)

    def _with_quality(self, tried: Tried) -> Tried:
        """Train as it is and changed from several seeds, to the end of their epochs."""
        try:
            usual, changed = (
                tuple(self._loss(change, seed) for seed in _SEEDS)
                for change in (USUAL, tried.change)
            )
        except JobError as error:
            return replace(tried, gain=replace(tried.gain, problem=str(error)))
        return replace(tried, losses=(usual, changed))

    def _loss(self, change: Change, seed: int) -> float:
        """Give the best validation loss of a whole training.

        Raises:
            JobError: It failed, or has none.
        """
        name = f"{change.name}-{seed}"
        run = RunDirectory(folder_in(self.place, "quality") / name)
        # Train, unless an earlier, interrupted tuning has done so already.
        if read_whole(run, name) is None:
            size, given = self._as_changed(change)
            writer = self.training.commands({**given, "seed": seed}, 0.0)
            command = train_or_resume(writer, size, run, self.training.batch)
            self.print_line(f"  {change.name}: a whole training from seed {seed}")
            log = folder_in(self.place, "logs") / f"quality-{name}.log"
            ended = run_command([*self.program, *command], log, _MAX_TRAINING_S, lambda: False)
            if ended.problem is not None:
                raise JobError(f"from seed {seed}: {ended.problem}")
        trained = read_whole(run, name)
        loss = None if trained is None else trained.best_val_loss
        if loss is not None and math.isfinite(loss):
            return loss
        raise JobError(f"from seed {seed}: there is no validation loss")


def _kind_of(failed: Measured) -> type[PacelineError]:
    kinds = (UsageError, InfrastructureError)
    return next((kind for kind in kinds if kind.exit_code == failed.exit_code), JobError)


def _is_open(tried: Tried, turn: int) -> bool:
    """Tell whether more trials may settle what isn't settled."""
    return not tried.gain.should_prune and (turn <= PAIRS or not tried.gain.is_settled)


def _other_training(usual: Measured, changed: Measured) -> str | None:
    """Say why two trials don't train the same, or None."""
    before, after = usual.profile, changed.profile
    if before is None or after is None or before.global_batch == after.global_batch:
        return None
    return f"its global batch is {after.global_batch:,} instead of {before.global_batch:,}"
