"""One optimizer step: forward, backward, combine, update."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.metrics.counters import StepCounters
from paceline.optim.clip import clip_gradients
from paceline.optim.rate_control import RateControl
from paceline.sync.allreduce import without_sync
from paceline.trainer.job import LossFunction
from paceline.trainer.losses import as_scores
from paceline.trainer.options import Precision
from paceline.trainer.seeding import step_seed


class LossScaler(Protocol):
    """What a step needs of `torch.amp.GradScaler`."""

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the scale."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale."""

    def step(self, optimizer: torch.optim.Optimizer) -> float | None:
        """Step unless a gradient isn't finite."""

    def update(self) -> None:
        """Adapt the scale."""


def autocast(
    precision: Precision, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Give the context of a forward pass in this precision."""
    if precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return lambda: torch.autocast(device.type, dtype=dtype)


@final
@dataclass(kw_only=True)
class Stepper:
    """Runs optimizer steps on batches of this worker. Collective: every worker runs every step."""

    module: nn.Module
    """The replicated model: its backward pass averages gradients over the workers."""
    loss: LossFunction
    optimizer: torch.optim.Optimizer
    rate: RateControl
    counters: StepCounters
    forward_context: Callable[[], AbstractContextManager[object]]
    scaler: LossScaler | None
    clip_norm: float | None
    world_size: int
    micro_batch: int
    """The most samples that go through the model at once."""
    step_key: int
    """What this worker's random numbers follow from."""
    generators: list[torch.Generator]
    """The generators to seed before each step."""

    def run(self, batch: Batch, step: int) -> None:
        """Take optimizer step number `step` (from 0) on this worker's share of the global batch.

        The gradient is the mean over the global batch's samples, however they are spread: each
        micro-batch is weighted by its number of samples.
        """
        self._reseed(step)
        self.rate.apply(step)
        if batch.local == 0:
            self._stand_in(batch)
        elif batch.local <= self.micro_batch:
            self._pass(batch.inputs, batch.targets, batch, step)
        else:
            *first, last = self._micro_batches(batch)
            with without_sync(self.module):
                for inputs, targets in first:
                    self._pass(inputs, targets, batch, step)
            self._pass(*last, batch, step)
        self._update()

    def rehearse(self, batch: Batch) -> None:
        """Run a backward pass without effect, after which the buckets of gradients stay the same.

        DistributedDataParallel reorders them once, after the first backward pass of a process. From
        three workers on their order settles how sums are rounded, so that a resumed training would
        differ in its last bits from one that wasn't interrupted. Collective.

        Args:
            batch: One sample, the same on every worker.
        """
        with torch.compiler.set_stance("force_eager"):
            self._stand_in(batch)
        self.optimizer.zero_grad(set_to_none=True)

    def _pass(self, inputs: Tensor, targets: Tensor, batch: Batch, step: int) -> None:
        samples = targets.shape[0]
        with self.forward_context():
            outputs = self.module(inputs)
        outputs = as_scores(outputs)
        loss = self.loss(outputs, targets)
        # The workers' gradients are averaged: local mean x samples x workers / total.
        weight = samples * self.world_size / batch.total
        self._backward(loss if weight == 1.0 else loss * weight)
        self.counters.add(loss, outputs, targets, step)

    def _stand_in(self, batch: Batch) -> None:
        """Take part in a step whose last short batch left no sample for this worker.

        Runs one sample of the batch in evaluation mode (so that BatchNorm and the counters see
        nothing of it) and weights its gradient with zero.
        """
        self.module.eval()
        with self.forward_context():
            outputs = self.module(batch.inputs)
        self.module.train()
        self._backward(self.loss(as_scores(outputs), batch.targets) * 0.0)

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _update(self) -> None:
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            clip_gradients(self.module.parameters(), self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _micro_batches(self, batch: Batch) -> Iterable[tuple[Tensor, Tensor]]:
        inputs, targets = (t.split(self.micro_batch) for t in (batch.inputs, batch.targets))
        return zip(inputs, targets, strict=True)

    def _reseed(self, step: int) -> None:
        seed = step_seed(self.step_key, step)
        for generator in self.generators:
            generator.manual_seed(seed)
