"""`--compile auto`: compiles models if the steps that remain will win back the time it takes."""

from collections.abc import Mapping
from typing import final

import torch

from paceline.options.durations import format_duration
from paceline.results.json_object import section, text
from paceline.results.metrics_table import EpochRow
from paceline.training.components import CompileSwitch, Components
from paceline.training.context import TrainingContext
from paceline.training.hooks.base import StepHook
from paceline.training.snapshots.train_state import TrainState
from paceline.training.step_times import StepTimes, compare
from paceline.training.sync.base import GradientSync

MIN_LEFT_S = 300.0
"""With less than this to train a model isn't compiled: that takes up to a minute, and saves, where
it saves anything, a fifth of the time and more."""
_WARM_UP = 3
"""Steps that aren't measured: of a start, or with a model that has just been compiled."""
_MAX_STEPS, _MIN_S = 64, 2.0
"""A way is measured for so many steps, or for so long."""
_SURE_S = 20.0
"""So long before it is given up to compile."""
_NAME = "compile"
_TRYING = "auto: compiles the model"


@final
class CompileChoice(StepHook):
    """Measures steps as they are, then compiled ones if that may pay, and keeps what is faster.

    What is measured differs from start to start; once chosen, a resumed training keeps it. Rank 0
    decides, by its clock.
    """

    def __init__(self, context: TrainingContext, sync: GradientSync, switch: CompileSwitch) -> None:
        """Args:
        context: The training.
        sync: Which, with `--sync auto`, measures first.
        switch: Which passes are compiled.
        """
        self._context, self._sync, self._switch = context, sync, switch
        self._position = TrainState()
        self._choice: bool | None = None
        """Whether the model is compiled; None until that is settled."""
        self._why = ""
        self._plain_s: float | None = None
        """A step as it is; None while that is measured."""
        self._times = StepTimes(context.group.device, _WARM_UP)

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Keep what a snapshot says was chosen; don't try again what a training didn't survive."""
        self._position = position
        found = section(saved, _NAME)
        if self._is_collective(components):
            self._settle(False, "BatchNorm is synchronized in the forward pass")
        elif isinstance(found.get("choice"), bool):
            self._settle(bool(found["choice"]), str(found.get("why")))
        elif self._context.group.broadcast_text(self._noted()) == _TRYING:
            self._settle(False, "the workers ended while they compiled it, or were ended")

    def after_step(self, step: int) -> None:
        """Measure the step; where enough is measured, decide. Collective then."""
        if self._choice is not None:
            self._report_failure()
        elif self._is_measured():
            self._decide()

    def _decide(self) -> None:
        """Compare the measured times, and choose once they are enough. Collective."""
        times = self._times
        # Rank 0's times count, so that all workers decide alike; failures of any worker do.
        own = [times.median_s, times.total_s, self._switch.problem is not None]
        rows = self._context.group.gather_rows(torch.tensor(own, dtype=torch.float64))
        step_s, measured_s, _ = rows[0].tolist()
        failed = rows[:, 2].nonzero().flatten().tolist()
        if measured_s < _MIN_S and len(times) < _MAX_STEPS and not failed:
            return
        # Plain steps come first; compiled ones are compared with these.
        if self._plain_s is None:
            self._choose_to_try(step_s, measured_s)
        elif failed:
            problems = self._context.group.gather_texts(self._switch.problem or "")
            self._choose(False, f"that failed on rank {failed[0]}: {problems[failed[0]]}")
        else:
            self._choose(*compare(step_s, self._plain_s, now="compiled", plain="as it is"))

    def end_epoch(self, row: EpochRow) -> None:
        """Leave the evaluation out of the next step's time, if not every step has one."""
        if self._context.progress.steps_per_epoch != 1:
            self._times.pause()

    def state_dict(self) -> Mapping[str, object]:
        """Give what was chosen."""
        if self._choice is None:
            return {}
        return {_NAME: {"choice": self._choice, "why": self._why}}

    def _is_collective(self, components: Components) -> bool:
        """Tell whether a pass that is computed again, where compiling fails, would be one more."""
        options = self._context.config.compute
        several = self._context.group.world_size > 1
        return several and (options.sync_batchnorm or components.have_synced_batchnorm())

    def _is_measured(self) -> bool:
        """Time a step; tell whether times are to be compared now. Local, alike on all workers."""
        if self._sync.is_measuring:
            return False
        if len(self._times) == _MAX_STEPS:
            return self._position.epoch > 0  # until then an epoch's length wasn't known
        self._times.take()
        return self._times.is_due

    def _choose_to_try(self, step_s: float, measured_s: float) -> None:
        """Compile the next steps, if enough steps remain for it to pay. Collective.

        Args:
            step_s: A step as it is, by rank 0's clock.
            measured_s: All that were measured.
        """
        found_s = self._left_s(step_s)
        sent = self._context.group.broadcast_text("" if found_s is None else str(found_s))
        if not sent:
            return  # it shows when the first epoch is over
        left_s = float(sent)
        if left_s < MIN_LEFT_S:
            # The first steps of a start may be slow: what is final needs more of them.
            if len(self._times) == _MAX_STEPS or measured_s >= _SURE_S:
                self._choose(False, f"with {format_duration(left_s)} left it wouldn't pay")
            return
        line = f"--compile {_TRYING}, for the last {format_duration(left_s)}"
        self._context.announce(line, compile=_TRYING)
        self._plain_s, self._switch.is_on = step_s, True
        self._times.restart()

    def _report_failure(self) -> None:
        """Warn where a batch of another shape couldn't be compiled later on. Local."""
        problem, self._switch.problem = self._switch.problem, None
        if self._choice and problem is not None:
            rank = self._context.group.rank
            self._context.console.warn(
                f"--compile auto: rank {rank} goes on with what isn't compiled: {problem}"
            )

    def _choose(self, choice: bool, why: str) -> None:
        """Settle it, and have steps be measured anew by the profile."""
        self._settle(choice, why)
        self._context.profiler.step_profiler.reset(self._position.step)
        self._context.announce(f"--compile {self._switch.label}", compile=self._switch.label)

    def _settle(self, choice: bool, why: str) -> None:
        self._choice, self._why, self._switch.is_on = choice, why, choice
        self._switch.label = f"auto: {'compiled' if choice else 'not compiled'}, since {why}"

    def _noted(self) -> str:
        """Read what `run.json` says of an earlier start of this training. On rank 0."""
        run = self._context.run
        if self._context.group.rank != 0 or not run.run_json.exists():
            return ""
        return text(section(run.read_run(), "derived"), _NAME) or ""

    def _left_s(self, step_s: float) -> float | None:
        """Estimate what is left to train; None where an epoch's length isn't known yet."""
        state, progress = self._position, self._context.progress
        steps: float = state.total_steps
        if not steps and state.epoch:
            steps = progress.loop.epochs * state.step / state.epoch
        found = [(steps - state.step) * step_s] if steps else []
        if progress.budget_s is not None:
            found.append(progress.budget_s - state.elapsed_s)
        return min(found, default=None)
