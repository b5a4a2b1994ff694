"""What a step does after the forward pass: backward, combine, update."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.data.batch import Batch
from paceline.errors import UsageError
from paceline.gradient_sync.name_list import list_names
from paceline.gradient_sync.replica import Replica
from paceline.optim.clip import clip_gradients
from paceline.training.observer import Watcher
from paceline.training.optimizer_calls import OwnStep
from paceline.training.options import Precision
from paceline.training.profiling.step_profiler import Pace
from paceline.training.sync.sharding import Sharding

NEVER_STEPPED = (
    "the epoch ended with batches that had no s.step(loss): what a script computes by "
    "loss.backward() alone stays each worker's own"
)


class LossScaler(Protocol):
    """What a step needs of `torch.amp.GradScaler`."""

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the scale."""

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale."""

    def step(self, optimizer: Optimizer) -> float | None:
        """Step unless a gradient isn't finite."""

    def update(self) -> None:
        """Adapt the scale."""

    def get_scale(self) -> float:
        """Give the scale."""


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
    """Turns losses into gradients of the whole global batch, and these into new weights."""

    world_size: int
    """Number of workers."""
    scaler: LossScaler | None
    clip_norm: float | None
    pace: Pace
    """Is told when gradients are exchanged."""
    report: Callable[[str], None]
    """Is told once about parameters that get no gradient."""
    replicas: list[Replica] = field(default_factory=list)
    zero_grads: list[Callable[..., None]] = field(default_factory=list)
    """The optimizers' own, from before the script's calls of it lead to the session."""
    sharding: Sharding | None = None
    """In reproducible mode: sums the gradients in place of the replicas."""
    watcher: Watcher | None = None
    counts_batches: bool = False
    """Whether only batches of the training loader may be trained on: where workers train on their
    own, what is due after a step is counted by them."""
    has_stepped_alone: bool = False
    """Whether something else than a batch of the training loader has been trained on."""
    own_steps: list[OwnStep] = field(default_factory=list)
    """Of the optimizers, whose calls by the script lead here."""
    _has_stepped: bool = False
    """Whether an optimizer has stepped since the loss scale was adapted."""
    _unscaled: list[Optimizer] = field(default_factory=list)
    """Whose gradients have their true size already, in fp16."""

    def backward(self, loss: Tensor, batch: Batch, *, more: bool = False) -> None:
        """Add a loss's gradient to what is there. Collective where it is the step's last piece.

        Args:
            loss: Scalar, the mean over this worker's samples in the batch.
            batch: What it is about: a worker's share of the global batch, or a piece of it.
            more: Another backward pass about the same batch will follow.

        Raises:
            UsageError: The gradients have been unscaled: nothing can be added to them any more.
        """
        if self.sharding is None:
            # The workers' gradients are averaged, not summed.
            self._run(loss, batch.local * self.world_size / batch.total, settles=batch.last)
            return
        completes = batch.last and not more
        if completes:
            self.pace.begin(loss)
        self.sharding.before_backward(batch, more=more)
        self._run(loss, batch.local / batch.total, settles=False)
        unused = self.sharding.after_backward(batch, more=more)
        if completes:
            self.pace.end()
        if unused:
            self.report(describe_unused("the models", unused))

    def backward_alone(self, loss: Tensor) -> None:
        """Add a loss's gradient that isn't about a batch of the session. Collective.

        Raises:
            UsageError: In reproducible mode, where only a batch says which shard it is about; with
                local steps, which are counted by batches.
        """
        if self.counts_batches:
            raise UsageError(
                "with --sync local or diloco a step is about a batch of the training loader, "
                "within the loop over s.loader(...): by these it is counted when weights are "
                "averaged"
            )
        if self.sharding is not None:
            raise UsageError(
                "with --shards a step is about a batch of the training loader, within the loop "
                "over s.loader(...): only it knows its shard"
            )
        self.has_stepped_alone = True
        self._run(loss, 1.0, settles=True)

    def _run(self, loss: Tensor, weight: float, *, settles: bool) -> None:
        if self.watcher is not None:
            self.watcher.loss(loss, weight)
        weighted = loss if weight == 1.0 else loss * weight
        if self.scaler is not None:
            weighted = self._scaled(weighted, self.scaler)
        if settles:
            self.pace.begin(loss)
        elif self.pace.is_looking:
            self.pace.mark("backward")
        weighted.backward()
        if not settles:
            if self.pace.is_looking:
                self.pace.mark("piece")
            return
        for replica in self.replicas:
            unused = replica.settle()
            if unused:
                self.report(describe_unused(type(replica.module).__name__, unused))
        self.pace.end()

    def _scaled(self, loss: Tensor, scaler: LossScaler) -> Tensor:
        self.end_update()
        if self._unscaled:
            raise UsageError(
                "with fp16 the gradients have their true size after s.backward(loss): say "
                "s.backward(loss, more=True) where another backward pass follows, or add the "
                "losses up"
            )
        return scaler.scale(loss)

    def update(self, optimizers: Sequence[Optimizer], *, forgets: bool = True) -> None:
        """Clip, and take the optimizers' step.

        Args:
            optimizers: Those to update with.
            forgets: Drop all gradients; otherwise the script does.
        """
        if self.clip_norm is not None:
            self.unscale(optimizers)
            for optimizer in optimizers:
                clip_gradients(_parameters(optimizer), self.clip_norm)
        if self.scaler is None:
            for optimizer in optimizers:
                optimizer.step()
        else:
            for optimizer in filter(_has_gradients, optimizers):
                self.scaler.step(optimizer)
                self._has_stepped = True
        if forgets:
            self.forget()
        if self.pace.is_looking:
            self.pace.mark("updated")

    def end_update(self) -> None:
        """Adapt the loss scale after the optimizers' steps: once for all of them."""
        if self.scaler is not None and self._has_stepped:
            self._has_stepped, self._unscaled = False, []
            self.scaler.update()

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        """Give gradients their true size, where a loss scaler has made them larger."""
        if self.scaler is None:
            return
        for optimizer in optimizers:
            if optimizer not in self._unscaled and _has_gradients(optimizer):
                self.scaler.unscale_(optimizer)
                self._unscaled.append(optimizer)

    def forget(self) -> None:
        """Drop all gradients."""
        if self.scaler is not None:
            self.end_update()
            self._unscaled = []
        for zero_grad in self.zero_grads:
            zero_grad(set_to_none=True)

    def abandon(self) -> None:
        """Drop what the pieces of an unfinished step have left, of which nothing is averaged."""
        self.forget()
        for replica in self.replicas:
            replica.forget()
        self.hold_back(syncing=True)

    def refuse_a_step_of_its_own(self) -> NoReturn:
        """Refuse an optimizer's step by the script: the workers would grow apart without a word.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "optimizer.step() by the script itself, with gradients that aren't those of all "
            "workers: put s.backward(loss) in the place of loss.backward(); or s.step(loss) in "
            "the place of loss.backward(), optimizer.step() and optimizer.zero_grad()"
        )

    def release(self) -> None:
        """Give models and parameters back as they were. Local to the worker."""
        if self.sharding is not None:
            self.sharding.release()
        for own_step in self.own_steps:
            own_step.release()
        for replica in self.replicas:
            replica.release()

    def hold_back(self, *, syncing: bool) -> None:
        """Say whether the next backward pass completes the step's gradients."""
        for replica in self.replicas:
            replica.syncing = syncing


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for p in _parameters(optimizer))


def describe_unused(model: str, names: Sequence[str]) -> str:
    """Say which parameters get no gradient."""
    return (
        f"{len(names)} parameters of {model} get no gradient and stay as they are: "
        f"{list_names(names)}. "
        "Set requires_grad to False for them, or leave them out, if that is what you want"
    )
