"""What a step does after the forward pass on this worker alone: backward, clip, update."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn, Protocol, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.gradient_sync.name_list import list_names
from paceline.optim.build import clip_gradients
from paceline.training.observer import Watcher
from paceline.training.optimizer_calls import OwnStep
from paceline.training.options import Precision
from paceline.training.profiling.step_profiler import Pace

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
    """Turns losses into gradients, and these into new weights."""

    scaler: LossScaler | None
    clip_norm: float | None
    pace: Pace
    """Is told when gradients are exchanged."""
    report: Callable[[str], None]
    """Is told once about parameters that get no gradient."""
    zero_grads: list[Callable[..., None]] = field(default_factory=list)
    """The optimizers' own, from before the script's calls of it lead to the session."""
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

    def begin_alone(self) -> None:
        """Note that the next backward pass isn't about a batch of the training loader.

        Raises:
            UsageError: With local steps, which are counted by batches.
        """
        if self.counts_batches:
            raise UsageError(
                "with --sync local or diloco a step is about a batch of the training loader, "
                "within the loop over s.loader(...): by these it is counted when weights are "
                "averaged"
            )
        self.has_stepped_alone = True

    def run_backward(self, loss: Tensor, weight: float, *, completes: bool) -> None:
        """Add a loss's gradient to what is there. Collective where the models' replicas average.

        Args:
            loss: Scalar.
            weight: Of it: how much of the step's gradient it is.
            completes: Gradients are exchanged in this pass, or right after it: `pace.end` follows.

        Raises:
            UsageError: The gradients have been unscaled: nothing can be added to them any more.
        """
        if self.watcher is not None:
            self.watcher.loss(loss, weight)
        weighted = loss if weight == 1.0 else loss * weight
        if self.scaler is not None:
            weighted = self._scaled(weighted, self.scaler)
        if completes:
            self.pace.begin(loss)
        elif self.pace.is_looking:
            self.pace.mark("backward")
        weighted.backward()
        if not completes and self.pace.is_looking:
            self.pace.mark("piece")

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
        """Give the optimizers back as they were. Local to the worker."""
        for own_step in self.own_steps:
            own_step.release()


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
