"""State of a training that engine, gradient synchronisation and hooks share on a worker."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from torch import Tensor
from torch.optim import Optimizer

from paceline.data.batch import Batch
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.gradient_sync.replica import Replica
from paceline.metrics.console import Console
from paceline.metrics.counters import Totals
from paceline.optim.loss_scaler import LossScaler
from paceline.results.run_directory import RunDirectory, SampleUnit
from paceline.training.components import Components
from paceline.training.config import TrainConfig
from paceline.training.evaluation.distributed_mean import Metrics
from paceline.training.hooks.base import StepHooks
from paceline.training.optimizer_step import OptimizerStep
from paceline.training.profiling.gpu_monitor import GpuMonitor
from paceline.training.profiling.profile_writer import Profiler
from paceline.training.progress import TrainingProgress
from paceline.training.rng import RandomStreams
from paceline.training.sync.buffer_averaging import BufferAverager

CountedBy = Literal["batches", "turns", "updates"]
"""Batches of the training loader; without one, turns of a loop over `s.steps`, or updates after
`s.begin`."""


@final
@dataclass(kw_only=True)
class OpenStep:
    """State of the current step."""

    batch: Batch | None = None
    """What the script has been given to train on, while that step isn't over."""
    loss_before: Tensor | None = None
    """Of the backward passes about the same batch that came before."""
    counted: int = -1
    """The last step whose loss has been counted: a second one belongs to another optimizer."""
    updated: int = -1
    """The last step with an update."""
    gathered: tuple[int, bool] | None = None
    """The last `TrainingContext.place` at which the script has gathered all workers' rows."""
    skipped: int = 0
    """Steps about a batch without a backward pass, in this process."""


@final
class StepCounter:
    """Decides when an optimizer step is complete.

    In a loop over `s.steps` that is when the next one is asked for. After `s.begin` it is when
    every optimizer has been updated; what is due then (a snapshot, the end on a signal) waits for
    the next backward pass, so that what the script does behind the update belongs to the step.
    """

    def __init__(self, by: CountedBy = "batches", optimizers: Sequence[Optimizer] = ()) -> None:
        """Create the step counter.

        Args:
            by: What ends a step.
            optimizers: All that there are.
        """
        self.by = by
        self._optimizers = optimizers
        self._updated: set[int] = set()
        self._is_due = False

    def is_over_with(self, updated: Iterable[Optimizer]) -> bool:
        """Note an update, and tell whether the step is over with it."""
        self._updated.update(map(id, updated))
        if self.by != "updates" or len(self._updated) < len(self._optimizers):
            return False
        self._updated.clear()
        self._is_due = True
        return True

    def take_due(self) -> bool:
        """Tell whether a step has ended since the last call."""
        due, self._is_due = self._is_due, False
        return due


@final
@dataclass(kw_only=True)
class OpenEpoch:
    """State of the current epoch."""

    is_open: bool = False
    """Whether the body of `epochs` is running."""
    passed: bool = False
    """Whether the epoch's pass over the training loader has begun."""
    left: bool = False
    """Whether the script has left its loop early, and the pass hasn't been ended."""
    trained: Totals | None = None
    """Sums of a pass that is over."""
    validated: bool = False
    """Whether there has been an evaluation."""
    validated_on: object = None
    """The loader whose loss or accuracy count."""
    lr: float | None = None
    """Of the last step: the script may step its scheduler before the epoch is recorded."""
    logged: Metrics = field(default_factory=dict)
    """Figures of the script's own for the epoch's row."""


@final
@dataclass(kw_only=True)
class ScriptLoop:
    """State of the script's own loop on this worker; it may differ between workers."""

    has_left: bool = False
    """Whether it has left its loop over epochs or steps before the end, by `break` say."""
    asks_for_steps: bool = False
    """Whether it has asked how many steps the whole training has done."""


@final
@dataclass(kw_only=True)
class TrainingContext:
    """A training on this worker.

    One object, since session, engine, hooks and snapshots work on the same training: a field for
    each part that it is made of, which `training/setup.py` puts together.
    """

    config: TrainConfig
    """All options, as far as they are settled: the script may have a say before the first step."""
    run: RunDirectory
    group: Group
    """The workers, and their collectives."""
    division: Division
    """Which parts of a step each worker has."""
    components: Components
    """Models, optimizers and loaders; complete from `setup` on."""
    optimizer_step: OptimizerStep
    """Runs backward passes, and updates."""
    progress: TrainingProgress
    """Position, and the length of an epoch."""
    hooks: StepHooks
    """The step hooks."""
    profiler: Profiler
    """Measures where a step's time goes."""
    gpu: GpuMonitor | None
    """Watches this worker's GPU; None on a CPU."""
    buffer_averager: BufferAverager
    """The models' running statistics, by part."""
    random: RandomStreams
    """This worker's generators."""
    console: Console
    """Says things to the user; on rank 0."""
    scaler: LossScaler | None
    """The loss scaler, with `--precision fp16`."""
    writes: bool
    """Whether this worker writes snapshots."""
    shared: bool
    """Whether all nodes see the run directory; otherwise one worker of each node writes."""
    kept_options: tuple[str, ...] = ()
    """Options of an optimizer that hold as they are now, whatever a snapshot says."""
    replicas: list[Replica] = field(default_factory=list)
    """What takes part in the models' forward and backward passes."""
    script: ScriptLoop = field(default_factory=ScriptLoop)
    step: OpenStep = field(default_factory=OpenStep)
    epoch: OpenEpoch = field(default_factory=OpenEpoch)

    def announce(self, line: str, **derived: object) -> None:
        """Say a line, and note in `run.json` what has come to be. On rank 0."""
        if self.group.rank == 0:
            self.console.say(line)
            self.run.add_derived(**derived)

    @property
    def place(self) -> tuple[int, bool]:
        """The step under way, and whether it is about a batch."""
        return self.progress.state.step, self.step.batch is not None

    @property
    def has_updated(self) -> bool:
        """Whether the step under way has been updated, but isn't counted yet."""
        return self.step.updated == self.progress.state.step

    @property
    def unit(self) -> SampleUnit:
        """What a sample is called on the screen."""
        loader = self.components.train_loader
        return "samples" if loader is None else loader.served.unit
