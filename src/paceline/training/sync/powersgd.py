"""`--sync powersgd`: full averages until the warm-up ends, then PowerSGD; resumes exactly."""

from collections.abc import Callable, Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from paceline.distributed.device import is_accelerator
from paceline.gradient_sync.low_rank import LowRankState
from paceline.gradient_sync.powersgd import PowerSGD
from paceline.training.context import TrainingContext
from paceline.training.snapshots.per_worker_states import RankState, gather_states
from paceline.training.sync.allreduce import ReplicaSync
from paceline.training.sync.base import SyncState
from paceline.training.sync.validation import warmup_steps


@final
class PowerSGDSync(ReplicaSync):
    """Has every model's gradients approximated from the end of the warm-up on."""

    def __init__(self, context: TrainingContext) -> None:
        """Begin with full averages."""
        super().__init__(context)
        self._averagers: dict[str, PowerSGD] = {}
        """Averager of each model, by its name."""
        self._warmup_steps = 0
        self._is_warm = False

    def setup(self, step: int) -> None:
        """Make an averager for each model; it begins here where the warm-up is over."""
        context = self.context
        self._warmup_steps = warmup_steps(context.config, context.progress.steps_per_epoch)
        self._make()
        self.after_step(step)

    def after_step(self, step: int) -> None:
        """Begin with the end of the warm-up. Local to the worker."""
        if self._is_warm or step < self._warmup_steps:
            return
        self._is_warm = True
        self.context.profiler.restart()
        for averager, replica in zip(self._averagers.values(), self.replicas, strict=True):
            replica.defer_to(averager)

    def close(self) -> None:
        """Give up the averagers' memory."""
        for averager in self._averagers.values():
            averager.release()

    def state_dict(self) -> SyncState:
        """Give all workers' errors, which travel, and the common bases. Collective."""
        remembered, keeps = dict(self._remembered()), self.context.writes
        own = RankState(tensors={key: low_rank.error for key, low_rank in remembered.items()})
        states = gather_states(self.context.group, own, keeps=keeps) if remembered else []
        tensors = {}
        if keeps:
            for key, low_rank in remembered.items():
                tensors[f"error/{key}"] = torch.stack([state.tensors[key] for state in states])
                tensors[f"basis/{key}"] = low_rank.basis
        scales = {name: float(averager.scale) for name, averager in self._averagers.items()}
        return SyncState(tensors=tensors, values={"scales": scales})

    def load_state_dict(self, state: SyncState, world_size: int) -> str:
        """Put errors and bases back; with other workers, errors are shared out. Local."""
        self._make()
        scales = state.values.get("scales")
        assert isinstance(scales, dict)
        group = self.context.group
        for name, model in self.context.components.models.items():
            averager, own = self._averagers[name], dict(model.named_parameters())
            averager.scale = float(scales.get(name, 1.0))
            for parameter, errors in _errors_of(state.tensors, name).items():
                low_rank = averager.begin(parameter, own[parameter].detach())
                same = world_size == group.world_size
                low_rank.error.copy_(errors[group.rank] if same else errors.mean(0))
                basis = state.tensors[f"basis/{name}/{parameter}"]
                if basis.shape == low_rank.basis.shape:  # else --powersgd-rank has changed
                    low_rank.basis.copy_(basis)
        if world_size == group.world_size or not state.tensors:
            return ""
        return (
            "PowerSGD: what each of the "
            f"{world_size} workers had left to add to its gradients is shared out equally"
        )

    def _make(self) -> None:
        """Make what is missing: one averager for each model."""
        context, scaler = self.context, self.context.scaler
        options, workers = context.config.sync, context.group.world_size
        scale = _scale_of(scaler, on_device=is_accelerator(context.group.device))
        waiting = context.optimizer_step.step_profiler.waiting
        for name in self.context.components.models:
            if name not in self._averagers:
                self._averagers[name] = PowerSGD(workers, options.powersgd_rank, scale, waiting)

    def _remembered(self) -> Iterator[tuple[str, LowRankState]]:
        """Go through what is remembered, in the same order on all workers."""
        for name, averager in self._averagers.items():
            for parameter, low_rank in averager.low_rank.items():
                yield f"{name}/{parameter}", low_rank


def _scale_of(
    scaler: torch.amp.GradScaler | None, *, on_device: bool
) -> Callable[[], float | Tensor]:
    """Give a function for the loss scale: on a device a tensor, so that nothing waits for it."""
    if scaler is None:
        return lambda: 1.0

    def scale() -> float | Tensor:
        there = scaler._get_scale_async() if on_device else None  # None before its first use, too
        return scaler.get_scale() if there is None else there

    return scale


def _errors_of(tensors: Mapping[str, Tensor], model: str) -> dict[str, Tensor]:
    """Pick the errors of one model, by the parameter's name."""
    start = f"error/{model}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
