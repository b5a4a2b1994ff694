"""Writes `profile.json` from the times of all workers. All contribute, rank 0 writes."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import final

from paceline.distributed.group import Group
from paceline.files import write_atomic
from paceline.metrics.console import Communication
from paceline.results.profile import EpochCosts, StepProfile
from paceline.training.components import Components
from paceline.training.profiling.aggregation import (
    WorkerTimes,
    measure_worker,
    parts_of,
    spread_of,
    step_of,
    workers_of,
)
from paceline.training.profiling.step_profiler import StepProfiler
from paceline.training.progress import TrainingProgress
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement, Status
from paceline.training.sync.base import GradientSync

_MIN_S = 2.0
"""Epochs shorter than this don't each write a profile."""


@dataclass(kw_only=True)
class _Sums:
    """Sums over steps whose status the workers have exchanged."""

    steps: int = 0
    lap_s: float = 0.0
    exposed_s: float = 0.0
    waited_s: float = 0.0
    wire_bytes: float = 0.0

    def add(self, agreed: Agreement, steps: int, wire_bytes: float) -> None:
        """Count a lap: who waited least in it was the slowest, and waited for communication alone.

        Args:
            agreed: What the workers have exchanged at its end.
            steps: Of the lap.
        """
        self.steps += steps
        self.lap_s += agreed.lap_s
        self.exposed_s += min(agreed.waits_s) * steps
        self.waited_s += fmean(agreed.waits_s) * steps
        self.wire_bytes += wire_bytes

    def communication(self) -> Communication | None:
        """Give the shares of the laps' time; None without laps."""
        if not self.steps or self.lap_s <= 0:
            return None
        waiting_s = self.waited_s - self.exposed_s
        return Communication(
            exposed=min(1.0, self.exposed_s / self.lap_s),
            waiting=min(1.0, waiting_s / self.lap_s),
            wire_bytes=self.wire_bytes / self.steps,
        )


@final
@dataclass(kw_only=True)
class Profiler:
    """Combines the workers' step times, and counts bytes sent over the network.

    One object, since a profile is of steps, evaluations and snapshots of the same time:
    where a warm-up or an epoch ends, all of them are reset together.
    """

    path: Path
    """Of `profile.json`."""
    step_profiler: StepProfiler
    group: Group
    components: Components
    sync: str
    """The method that combines gradients."""
    wire_bytes: Callable[[], float] = float
    """Gives what this worker sends for a step's gradients: nothing until that is known."""
    evaluations_s: list[float] = field(default_factory=list)
    snapshots_s: list[float] = field(default_factory=list)
    _all: _Sums = field(default_factory=_Sums)
    _epoch: _Sums = field(default_factory=_Sums)
    _lap: _Sums = field(default_factory=_Sums)
    _restarts: bool = False
    """Whether measuring starts again with the next step."""
    _is_mixed: bool = False
    """Whether that happened within the lap under way."""
    _written_s: float | None = None

    def count(
        self, agreed: Agreement, status: Status, steps: int, progress: TrainingProgress
    ) -> Communication | None:
        """Take an exchange in. Local.

        Args:
            steps: Of which it is.
            progress: After it has taken the exchange in.

        Returns:
            What these steps spent on communication; None of a single worker.
        """
        step = progress.state.step
        self.step_profiler.count(steps, status, step, progress.step_to_sample())
        if self.group.world_size == 1:
            return None
        sent = self.wire_bytes() * steps
        self._lap = _Sums()
        self._lap.add(agreed, steps, sent)
        self._epoch.add(agreed, steps, sent)
        # Totals leave out a lap with steps of both kinds.
        if self._is_mixed:
            self._is_mixed = False
        else:
            self._all.add(agreed, steps, sent)
        return self._lap.communication()

    def close_epoch(self) -> Communication | None:
        """Give what the epoch's steps spent on communication, and begin another. Local."""
        epoch, self._epoch = self._epoch, _Sums()
        return self._communication(epoch)

    def epoch_waits(self) -> tuple[float, float, float]:
        """Give the time of the epoch's steps since this start, and of it how long the slowest
        worker waited for communication, and how long all waited on average. Local.
        """
        epoch = self._epoch
        return epoch.lap_s, epoch.exposed_s, epoch.waited_s

    def total(self) -> Communication | None:
        """Return what all steps since the warm-up spent on communication. Local."""
        return self._communication(self._all if self._all.steps else self._lap)

    def restart(self) -> None:
        """Note that gradients are combined otherwise from the next step on: a warm-up is over.

        Local. What was measured of the steps before stands until there is a step of the new kind.
        """
        self._restarts = self.step_profiler.sampled > 0

    def after_step(self, sync: GradientSync, step: int) -> None:
        """Call the gradient synchronisation's `after_step`. Collective, as that is.

        Args:
            step: How many have been taken.
        """
        if self._restarts:
            self.step_profiler.reset(step)
            self._restarts, self._is_mixed, self._all = False, True, _Sums()
        sync.after_step(step)

    @contextmanager
    def recording(self, progress: TrainingProgress) -> Iterator[None]:
        """Take the time for which the snapshot at the end of an epoch holds the training up.

        Collective: writes the profile afterwards.
        """
        begun_s = perf_counter()
        yield
        self.snapshots_s.append(perf_counter() - begun_s)
        self.record(progress)

    def evaluated(self, state: TrainState) -> None:
        """Note how long an evaluation has taken, and leave it out of the steps' time. Local."""
        if state.eval_s is not None:
            self.evaluations_s.append(state.eval_s)
        self.step_profiler.skip(state.step)

    def record(self, progress: TrainingProgress, *, must: bool = False) -> None:
        """Write the profile, unless one has been written just before. Collective."""
        now_s, before_s = progress.state.elapsed_s, self._written_s
        if not must and before_s is not None and now_s - before_s < _MIN_S:
            return
        self._written_s = now_s
        profile = self.profile(progress)
        if profile is not None and self.group.rank == 0:
            with suppress(OSError):  # a full disk must not end a training
                write_atomic(self.path, profile.to_json().encode())

    def profile(self, progress: TrainingProgress) -> StepProfile | None:
        """Put the workers' times together. Collective.

        Returns:
            The same on every worker but for the gradients, which are the worker's own; None where
            no step has been sampled.
        """
        own = measure_worker(self.step_profiler, socket.gethostname())
        workers = [WorkerTimes.from_json(text) for text in self.group.gather_texts(own.to_json())]
        return self._made(progress, workers) if any(each.steps for each in workers) else None

    def _communication(self, sums: _Sums) -> Communication | None:
        if self.group.world_size == 1:
            return Communication(exposed=0.0, waiting=0.0, wire_bytes=0.0)
        return sums.communication()

    def _made(self, progress: TrainingProgress, workers: list[WorkerTimes]) -> StepProfile:
        step_s = spread_of(self.step_profiler.laps()) or step_of(workers[0])
        parts = parts_of(workers, step_s.median)
        gradients = self.step_profiler.gradients.arrivals(parts.backward)
        plan, total = progress.plan, self.total()
        batch = round(plan.mean_batch) if plan else 0
        parameters = {id(p): p.nbytes for p in self.components.model.parameters()}
        return StepProfile(
            world_size=self.group.world_size,
            nodes=self.group.placement.nodes,
            sync=self.sync,
            device=self.group.device.type,
            global_batch=batch,
            steps_per_epoch=progress.steps_per_epoch,
            steps_seen=workers[0].steps,
            step_s=step_s,
            images_per_s=batch / step_s.median if step_s.median > 0 else 0.0,
            parts=parts,
            workers=workers_of(workers),
            gradients=gradients,
            gradient_bytes=sum(arrival.bytes for arrival in gradients),
            parameter_bytes=sum(parameters.values()),
            wire_bytes_per_step=total.wire_bytes if total else 0.0,
            epoch=EpochCosts(
                evaluation_s=_usual(self.evaluations_s),
                snapshot_s=_usual(self.snapshots_s),
                loader_start_s=_usual(self.step_profiler.loader_starts_s),
            ),
        )


def _usual(times_s: list[float]) -> float | None:
    return median(times_s) if times_s else None
