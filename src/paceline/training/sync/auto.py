"""`--sync auto`: measures the first steps, and chooses a method by them."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import final

import torch

from paceline.data.batch import Batch
from paceline.gradient_sync.compression import Compression
from paceline.gradient_sync.local_sgd.schedule import LocalTerms
from paceline.gradient_sync.options import SyncMethod
from paceline.results.profile import StepProfile
from paceline.training.context import TrainingContext
from paceline.training.step_times import StepTimes
from paceline.training.sync.allreduce import AllReduceSync, ReplicaSync
from paceline.training.sync.auto_policy import Choice, final_choice, first_choice
from paceline.training.sync.base import ON_AVERAGE, GradientSync, SyncState, were_apart
from paceline.training.sync.local_sgd import can_be_local, make_local
from paceline.training.sync.powersgd import PowerSGDSync
from paceline.training.sync.validation import describe_options, may_choose, warmup_steps

_MIN_STEPS, _MAX_STEPS, _MIN_S = 8, 64, 2.0
"""A way is measured for this many steps, or this long, whichever comes first."""
_ROUND_TRIPS = 5


@final
class AutoSync(ReplicaSync):
    """Averages in full, then in half precision where that may help, then chooses.

    What is measured differs from start to start; once chosen, a resumed training keeps it.
    """

    def __init__(self, context: TrainingContext) -> None:
        """Start with no measurements."""
        self.rounding = Compression(None)
        """What the gradients of all models travel in; may change later."""
        super().__init__(context, self.rounding)
        self.choice: Choice | None = None
        self.is_measuring = True
        self._inner: GradientSync | None = None
        """What was chosen, once it has begun; with all-reduce and bf16 there is nothing to do."""
        self._full: tuple[StepProfile, float] | None = None
        """Once steps that average in full are measured: where their time goes, and how long."""
        self._times = StepTimes(context.group.device)
        self._epoch = -1
        """Of the pass under way."""
        self.label = "auto: measuring the first steps"

    def setup(self, step: int) -> None:
        """Begin what a snapshot says was chosen; else full averages, to be measured."""
        super().setup(step)
        if self._inner is not None:
            self._inner.setup(step)
        elif self.choice is None or self._chosen("allreduce"):
            self.share_memory()

    def begin_step(self, step: int, batch: Batch | None) -> None:
        """Begin local steps with the first pass that may have them. Collective then."""
        epoch = self.context.progress.state.epoch
        if batch is not None and epoch != self._epoch:  # a pass begins
            self._epoch, is_only_step = epoch, self.context.progress.steps_per_epoch == 1
            if is_only_step:
                self._times.begin()
            else:  # its first step has none before it
                self._times.pause()
            chosen = self._chosen("local")
            if self._inner is None and chosen and epoch >= chosen.from_epoch:
                self._begin_chosen(step)
        if self._inner is not None:
            self._inner.begin_step(step, batch)

    def after_step(self, step: int) -> None:
        """Measure; once a choice is made, begin it or leave the step to it. Collective."""
        if self._inner is not None:
            self._inner.after_step(step)
        elif self.choice is None:
            self._measure()
        elif self._chosen("powersgd") and self._is_warm(step):
            self._begin_chosen(step)

    def end_epoch(self) -> bool:
        """Call the chosen method's, if there is one."""
        return self._inner is not None and self._inner.end_epoch()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Put in those of what was chosen."""
        return nullcontext() if self._inner is None else self._inner.averaged_weights()

    def state_dict(self) -> SyncState:
        """Give the choice, and the state of what was chosen."""
        if self.choice is None:
            return SyncState()
        values: dict[str, object] = {"choice": self.choice.to_json()}
        if self._inner is None:
            return SyncState(values=values)
        inner = self._inner.state_dict()
        return replace(inner, values={**values, self.choice.method: dict(inner.values)})

    def load_state_dict(self, state: SyncState, world_size: int) -> str:
        """Keep the choice for the same number of workers; measure again for another."""
        found = state.values.get("choice")
        if found is None:
            return ""
        # Another number of workers: what was measured doesn't hold any more.
        if world_size != self.context.group.world_size:
            again = (
                f"--sync auto measures again: it chose for {world_size} workers, and now there are "
                f"{self.context.group.world_size}"
            )
            return f"{again}. {ON_AVERAGE}" if were_apart(state.values) else again
        # The same number: go on with the chosen method, and with its state where it has one.
        choice = Choice.from_json(str(found))
        self._adopt(choice)
        values = state.values.get(choice.method)
        if values is None:
            return ""
        assert isinstance(values, Mapping)
        if choice.method == "local" and not can_be_local(self.context):
            notice = self._stay_alike()
            return f"{notice}. {ON_AVERAGE}" if were_apart(state.values) else notice
        self._inner = self._made(choice)
        return self._inner.load_state_dict(replace(state, values=values), world_size)

    def close(self) -> None:
        """End what was chosen."""
        super().close()
        if self._inner is not None:
            self._inner.close()

    def _chosen(self, method: SyncMethod) -> Choice | None:
        """Give the choice if it is this one."""
        return self.choice if self.choice and self.choice.method == method else None

    def _is_warm(self, step: int) -> bool:
        return step >= warmup_steps(self.context.config, self.context.progress.steps_per_epoch)

    def _measure(self) -> None:
        """Take the time of a step; now and then see whether that is enough. Collective then."""
        self._times.take()
        steps = len(self._times)
        if steps < _MIN_STEPS or not self._times.is_due:
            return
        enough = steps >= _MAX_STEPS or self._times.total_s >= _MIN_S
        own = torch.tensor([enough, self._times.median_s], dtype=torch.float64)
        is_enough, step_s = self.context.group.gather_rows(own)[0].tolist()
        if is_enough:
            self._choose(step_s)

    def _choose(self, step_s: float) -> None:
        """Choose, or try bf16 first. Collective; rank 0 decides.

        Args:
            step_s: Of the steps just measured, by rank 0's clock.
        """
        context, group = self.context, self.context.group
        if self._full is None:
            profile = context.profiler.profile(context.progress)
            choice = first_choice(profile) if group.rank == 0 else None
            if profile is not None:
                self._full = profile, step_s
        else:
            choice = self._last_word(*self._full, step_s)
        text = group.broadcast_text("" if choice is None else choice.to_json())
        if not text:
            self.leave_memory()
            self.rounding.dtype = torch.bfloat16
            self._times.restart()
            return
        state = context.progress.state
        is_warm = self._is_warm(state.step)
        self._adopt(replace(Choice.from_json(text), from_epoch=state.epoch + is_warm))
        if self._chosen("allreduce") is None:
            self.leave_memory()
        elif not self._in_memory:
            self.share_memory()
        if self._chosen("powersgd" if is_warm else "local"):  # else with the warm-up, or a pass
            self._begin_chosen(state.step)
        self._announce_choice()

    def _last_word(self, profile: StepProfile, full_s: float, half_s: float) -> Choice | None:
        """Choose, after steps in full and with bf16. Collective; None but on rank 0."""
        config, may_be_local = self.context.config, self._can_be_local()
        trip_s = self._round_trip_s()
        if self.context.group.rank != 0:
            return None
        rank = config.sync.powersgd_rank if may_choose(config, "powersgd") else None
        return final_choice(
            profile, full_s, half_s, trip_s, powersgd_rank=rank, may_be_local=may_be_local
        )

    def _adopt(self, choice: Choice) -> None:
        self.choice, self.chosen, self.is_measuring = choice, choice.method, False
        self.label = f"auto: {describe_options(choice.options)}, since {choice.why}"
        self.rounding.dtype = torch.bfloat16 if choice.sends_half else None
        if choice.method not in ("local", "powersgd"):  # those begin later
            self.context.profiler.begin_method(choice.method)

    def _begin_chosen(self, step: int) -> None:
        """Begin what was chosen, where nothing has come up that forbids it. Collective."""
        assert self.choice is not None
        if self._chosen("local") and not self._can_be_local():
            notice = self._stay_alike()
            if self.context.group.rank == 0:
                self.context.console.say(notice)
            return
        self._inner = self._made(self.choice)
        self._inner.setup(step)

    def _can_be_local(self) -> bool:
        """Learn whether all workers can train on their own. Collective."""
        own = torch.tensor([can_be_local(self.context)], dtype=torch.uint8)
        return bool(self.context.group.gather_rows(own).all())

    def _stay_alike(self) -> str:
        """Replace local steps by another method; returns a notice for the user. Local."""
        assert self.choice is not None
        method: SyncMethod = "bf16" if self.choice.sends_half else "allreduce"
        self._adopt(Choice(method=method, why="local steps don't go with this training any more"))
        return f"--sync {self.label}"

    def _made(self, choice: Choice) -> GradientSync:
        """Make what sees to a choice from here on. Collective."""
        if choice.method == "powersgd":
            self.rounding.dtype = None
            return PowerSGDSync(self.context)
        return make_local(self.context, LocalTerms.of(choice.options))

    def _round_trip_s(self) -> float:
        """Measure how long a small message takes to the next worker and back. Collective."""
        group, times_s = self.context.group, []
        for _ in range(_ROUND_TRIPS):
            begun_s = perf_counter()
            group.barrier()
            times_s.append(perf_counter() - begun_s)
        return median(times_s) / (group.world_size - 1)  # it goes once around

    def _announce_choice(self) -> None:
        """Say what was chosen, and note it in `run.json`. Rank 0."""
        self.context.announce(f"--sync {self.label}", sync=self.label)


def make_auto(context: TrainingContext) -> GradientSync:
    """Make the `AutoSync` of several workers; a single one has nothing to combine."""
    return AllReduceSync(context) if context.group.world_size == 1 else AutoSync(context)
