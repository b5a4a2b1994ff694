"""PowerSGD in a training: full averages first, then approximations; in snapshots it is exact."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor

from paceline.gradient_sync.low_rank import Thin
from paceline.gradient_sync.powersgd import PowerSGD
from paceline.gradient_sync.replica import Replica
from paceline.training.engine import Engine
from paceline.training.snapshots.per_worker_states import OwnState, gather_states
from paceline.training.sync.base import StepSync, SyncState
from paceline.training.sync.validation import warmup_steps


@final
class PowerSGDSync(StepSync):
    """Has every model's gradients approximated from the end of the warm-up on."""

    def __init__(self, engine: Engine) -> None:
        """Begin with full averages."""
        self._engine = engine
        self._averagers: dict[str, PowerSGD] = {}
        """By the model's name."""
        self._warmup_steps = 0
        self._is_warm = False

    def begin(self, step: int) -> None:
        """See `StepSync`."""
        self._warmup_steps = warmup_steps(self._engine.config, self._engine.course.steps_per_epoch)
        self._make()
        self.after_step(step)

    def after_step(self, step: int) -> None:
        """See `StepSync`. Local to the worker."""
        if self._is_warm or step < self._warmup_steps:
            return
        self._is_warm = True
        self._engine.profiler.begin_method("powersgd")
        for averager, replica in zip(self._averagers.values(), self._replicas, strict=True):
            replica.defer_to(averager)

    def begin_pass(self) -> None:
        """See `StepSync`: nothing is due."""

    def consensus(self) -> bool:
        """See `StepSync`: the weights are the same all the time."""
        return False

    def lent(self) -> AbstractContextManager[None]:
        """See `StepSync`: they stand for all already."""
        return nullcontext()

    def release(self) -> None:
        """See `StepSync`."""
        for averager in self._averagers.values():
            averager.release()

    def gathered(self) -> SyncState:
        """See `StepSync`. Collective: all workers' errors travel."""
        remembered, keeps = dict(self._remembered()), self._engine.keeper.writes
        own = OwnState(tensors={key: thin.error for key, thin in remembered.items()})
        states = gather_states(self._engine.group, own, keeps=keeps) if remembered else []
        tensors = {}
        if keeps:
            for key, thin in remembered.items():
                tensors[f"error/{key}"] = torch.stack([state.tensors[key] for state in states])
                tensors[f"basis/{key}"] = thin.basis
        scales = {name: averager.scale for name, averager in self._averagers.items()}
        return SyncState(tensors=tensors, values={"scales": scales})

    def restore(self, state: SyncState, world_size: int) -> str:
        """See `StepSync`. Local to the worker."""
        self._make()
        scales = state.values.get("scales")
        assert isinstance(scales, dict)
        group = self._engine.group
        for name, model in self._engine.parts.models.items():
            averager, own = self._averagers[name], dict(model.named_parameters())
            averager.scale = float(scales.get(name, 1.0))
            for parameter, errors in _of_model(state.tensors, "error", name).items():
                thin = averager.begin(parameter, own[parameter].detach())
                same = world_size == group.world_size
                thin.error.copy_(errors[group.rank] if same else errors.mean(0))
                basis = state.tensors[f"basis/{name}/{parameter}"]
                if basis.shape == thin.basis.shape:  # else --powersgd-rank has changed
                    thin.basis.copy_(basis)
        if world_size == group.world_size or not state.tensors:
            return ""
        return (
            "PowerSGD: what each of the "
            f"{world_size} workers had left to add to its gradients is shared out equally"
        )

    @property
    def _replicas(self) -> list[Replica]:
        return self._engine.stepper.replicas

    def _make(self) -> None:
        """Make what is missing: one averager for each model."""
        options, workers = self._engine.config.sync, self._engine.group.world_size
        scaler = self._engine.stepper.scaler
        scale = (lambda: 1.0) if scaler is None else scaler.get_scale
        waiting = self._engine.stepper.pace.waiting
        for name in self._engine.parts.models:
            if name not in self._averagers:
                self._averagers[name] = PowerSGD(workers, options.powersgd_rank, scale, waiting)

    def _remembered(self) -> Iterator[tuple[str, Thin]]:
        """Go through what is remembered, in the same order on all workers."""
        for name, averager in self._averagers.items():
            for parameter, thin in averager.thin.items():
                yield f"{name}/{parameter}", thin


def _of_model(tensors: Mapping[str, Tensor], kind: str, model: str) -> dict[str, Tensor]:
    """Pick what is of one kind and one model: tensors by the parameter's name."""
    start = f"{kind}/{model}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
