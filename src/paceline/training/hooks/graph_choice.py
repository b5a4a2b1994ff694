"""`--cuda-graphs`: reports whether graphs are used; with auto, keeps them if steps get faster."""

from collections.abc import Mapping
from typing import final

from paceline.results.metrics_table import EpochRow
from paceline.training.components import Components
from paceline.training.context import TrainingContext
from paceline.training.cuda_graphs import GraphSwitch
from paceline.training.hooks.base import StepHook
from paceline.training.snapshots.train_state import TrainState
from paceline.training.step_times import StepTimes, compare
from paceline.training.sync.base import GradientSync

_WARM_UP = 12
"""Steps that aren't measured: of a start (DistributedDataParallel times its first ten), and until
a shape has repeated and has been captured."""
_MAX_TRIED = 64
"""Steps after which it is given up to wait for such a shape."""
_STEPS = 16
"""Steps of which each way is measured by the median."""
_NOTHING_REPEATS = (
    "no batch that a graph can have came three times in one shape, with the model's attributes as "
    "they were"
)


@final
class GraphChoice(StepHook):
    """Measures steps without graphs, then with them, and keeps what is faster.

    Each worker decides for itself, and each start anew: the bits are the same either way.
    """

    def __init__(self, context: TrainingContext, sync: GradientSync, switch: GraphSwitch) -> None:
        """Args:
        context: The training.
        sync: Which, with `--sync auto`, measures first.
        switch: Says whether passes are graphs.
        """
        self._context, self._sync, self._switch = context, sync, switch
        self._settled = switch.label if switch.is_must else None
        """What has been said of the choice; None while it is open."""
        self._plain_s: float | None = None
        """A step without graphs; None while that is measured."""
        self._times = StepTimes(context.group.device, _WARM_UP)

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Choose nothing if models can't be captured; that is reported at the start."""
        if self._switch.problem is not None:
            self._settled = self._switch.label

    def after_step(self, step: int) -> None:
        """Measure the step; where enough is measured, decide. Local to the worker."""
        switch = self._switch
        if switch.label == self._settled:
            return
        # Also where graphs were kept, and another shape can't be captured.
        if switch.problem is not None:
            self._settle(False, switch.problem)
        elif self._times.left_out == _MAX_TRIED:
            self._settle(False, _NOTHING_REPEATS)
        elif self._is_measured():
            step_s = self._times.median_s
            self._times.restart()
            # Plain steps come first; those with graphs are compared with these.
            if self._plain_s is None:
                self._plain_s, switch.is_on = step_s, True
                return
            self._settle(*compare(step_s, self._plain_s, now="with graphs", plain="without"))

    def end_epoch(self, row: EpochRow) -> None:
        """Leave the evaluation out of the next step's time."""
        self._times.pause()

    def end_training(self, step: int) -> None:
        """Say where nothing has repeated."""
        if self._switch.is_must and not self._switch.captures and self._context.group.rank == 0:
            self._context.console.warn(
                f"--cuda-graphs on: nothing was captured, since {_NOTHING_REPEATS}"
            )

    def _is_measured(self) -> bool:
        """Take the time of a step; tell whether there are enough. Local to the worker."""
        if self._sync.is_measuring:
            return False
        is_tried = self._plain_s is not None
        self._times.take(is_warm=not is_tried or self._switch.captures > 0)
        return len(self._times) == _STEPS

    def _settle(self, is_kept: bool, why: str) -> None:
        self._switch.is_on = is_kept
        self._switch.label = f"auto: {'on' if is_kept else 'off'}, since {why}"
        self._settled = label = self._switch.label
        self._context.announce(f"--cuda-graphs {label}", cuda_graphs=label)
