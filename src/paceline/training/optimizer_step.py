"""The part of a step that is local to a worker: backward pass, gradient clipping, update.

A script may keep its own calls of an optimizer's `step()` and `zero_grad()`: see `ScriptOptimizer`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import MethodType
from typing import NoReturn, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.gradient_sync.name_list import list_names
from paceline.optim.build import clip_gradients
from paceline.optim.loss_scaler import OF_SESSION, LossScaler
from paceline.training.hooks.base import StepHook
from paceline.training.profiling.step_profiler import StepProfiler

_WITHOUT_UPDATE = (
    "the epoch ended with batches that had no s.step(loss): what a script computes by "
    "loss.backward() alone stays each worker's own"
)
_OTHER_LOADER = (
    "the epoch's steps weren't about batches of the training loader, which is the first that the "
    "session was given: it counts the steps, and snapshots within an epoch. Give the loader that "
    "is trained on to s.prepare(...) or s.loader(...) before others that shuffle"
)
_IN_BACKWARD = (
    "{kind}.step() within the backward pass, as by a hook on a parameter: the gradients there are "
    "this worker's alone, and aren't complete. Call it behind s.backward(loss)"
)
_WITHOUT_OPTIMIZER = (
    "s.backward(loss) without an optimizer that the session knows: give the script's to "
    "s.prepare(...) or s.optimizer(...), else no snapshot has its state, and a resumed training "
    "begins with a new one"
)
_UNKNOWN_OPTIMIZER = (
    "an optimizer that the session doesn't know ({kind}) updates its models: no snapshot has its "
    "state, a resumed training begins with a new one, and the clipping of gradients and the loss "
    "scale of fp16 leave it out. Build it before the loop and give it to s.prepare(...) or "
    "s.optimizer(...), with all parameters: requires_grad may say later which are trained"
)
UNUSED_GRADIENTS = (
    "this snapshot doesn't have gradients that no update has used yet: a training resumed from it "
    "goes on without them. Update with the last batch of an epoch as well"
)


@final
@dataclass(kw_only=True)
class OptimizerStep(StepHook):
    """Runs backward pass, clipping and update; a step hook if losses are scaled (fp16)."""

    scaler: LossScaler | None
    clip_norm: float | None
    step_profiler: StepProfiler
    """Takes the time of a step, and of the exchange of gradients."""
    report: Callable[[str], None]
    """Called once with what the user has to know: which parameters get no gradient."""
    backward_hooks: Sequence[Callable[[Tensor, float], None]] = ()
    """Called before each backward pass."""
    is_updating: bool = False
    """Whether an optimizer's step is ours; one that a script takes itself would be on its own."""
    has_gradients: bool = False
    """Whether there was a backward pass since the batch was given, or since the last update."""
    holds_pieces: bool = False
    """Whether pieces of the open batch have left gradients that others will be added to."""
    has_stepped_alone: bool = False
    """Whether something else than a batch of the training loader has been trained on."""
    _reported: set[str] = field(default_factory=set)
    """What has been said once."""
    _own_steps: "list[ScriptOptimizer]" = field(default_factory=list)
    """Of the optimizers, whose calls by the script lead here."""
    _zero_grads: list[Callable[..., None]] = field(default_factory=list)
    """The optimizers' own `zero_grad` methods."""
    _has_stepped: bool = False
    """Whether an optimizer has stepped since the loss scale was adapted."""
    _unscaled: list[Optimizer] = field(default_factory=list)
    """Whose gradients have their true size already, in fp16."""
    _begun: list[Optimizer] = field(default_factory=list)
    """Those that have been asked for a step, in fp16: the scaler may have skipped it."""
    _watch: RemovableHandle | None = None
    """On the steps of all optimizers of the process, while the training runs."""

    def run_backward(self, loss: Tensor, weight: float, *, completes: bool) -> None:
        """Add a loss's gradient to what is there. Collective where the models' replicas average.

        Args:
            loss: Scalar.
            weight: Of it: how much of the step's gradient it is.
            completes: Gradients are exchanged in this pass, or right after it, and
                `step_profiler.end` follows.

        Raises:
            UsageError: The gradients have been unscaled: nothing can be added to them any more.
        """
        self.has_gradients = True
        for before_backward in self.backward_hooks:
            before_backward(loss, weight)
        weighted, gradient = loss, None
        if self.scaler is not None:
            weighted = self._scaled(loss if weight == 1.0 else loss * weight, self.scaler)
        elif weight != 1.0:
            # That of weight * loss, bit by bit. PyTorch refuses what isn't a real scalar.
            is_scalar = loss.numel() == 1 and not loss.is_complex()
            gradient = torch.full_like(loss, weight) if is_scalar else None
        if completes:
            self.step_profiler.begin(loss)
        elif self.step_profiler.is_sampling:
            self.step_profiler.mark("backward")
        weighted.backward(gradient)
        if not completes and self.step_profiler.is_sampling:
            self.step_profiler.mark("piece")

    def _scaled(self, loss: Tensor, scaler: LossScaler) -> Tensor:
        self.end_update()
        if self._unscaled:
            raise UsageError(
                "with fp16 the gradients have their true size after s.backward(loss): say "
                "s.backward(loss, more=True) where another backward pass follows, or add the "
                "losses up"
            )
        return scaler.scale(loss)

    def update(self, optimizers: Sequence[Optimizer], *, zero_grads: bool = True) -> None:
        """Clip, and take the optimizers' step.

        Args:
            optimizers: Those to update with.
            zero_grads: Drop all gradients; otherwise the script does.
        """
        # Clip true gradients, hence unscaled ones.
        if self.clip_norm is not None:
            self.unscale(optimizers)
            for optimizer in optimizers:
                clip_gradients(_parameters(optimizer), self.clip_norm)
        self.is_updating = True
        # Update; the scaler leaves out optimizers whose gradients aren't finite.
        try:
            if self.scaler is None:
                for optimizer in optimizers:
                    optimizer.step()
            else:
                for optimizer in filter(_has_gradients, optimizers):
                    if optimizer not in self._begun:
                        self._begun.append(optimizer)
                        begin_momentum(optimizer)
                    self.scaler.step(optimizer)
                    self._has_stepped = True
        finally:
            self.is_updating = False
        if zero_grads:
            self.zero_grad()
        if self.step_profiler.is_sampling:
            self.step_profiler.mark("updated")

    def after_step(self, step: int) -> None:
        """Adapt the loss scale. Local to the worker."""
        self.end_update()

    def end_training(self, step: int) -> None:
        """Leave the optimizers with counts that are right. Local to the worker."""
        if self.scaler is not None:
            self.scaler.settle()

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

    def add_optimizer(self, optimizer: Optimizer, update: Callable[[Optimizer], None]) -> None:
        """Lead an optimizer's calls by the script here.

        Args:
            optimizer: Complete; stays the object it is.
            update: Updates with what `s.backward` has left.
        """
        self._own_steps.append(ScriptOptimizer(optimizer, self, update))
        self.collect_zero_grads()

    def collect_zero_grads(self) -> None:
        """Find the optimizers' `zero_grad` methods again: a script may have replaced them."""
        self._zero_grads = [own_step.zero_grad() for own_step in self._own_steps]

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.has_gradients = False
        if self.scaler is not None:
            self.end_update()
            self._unscaled = []
        for zero_grad in self._zero_grads:
            zero_grad()

    def watch_others(
        self, lacks: Callable[[Optimizer], bool | None], note: Callable[[], None]
    ) -> None:
        """Notice, until `release`, steps of optimizers that the session doesn't know.

        They are right as long as the training runs, since `s.backward` has combined the gradients.
        With `s.step` alone there are none, and nothing is to be watched.

        Args:
            lacks: Tells whether no snapshot has the optimizer's state, or None where it updates
                nothing of the session's; asked once of each.
            note: Called after each step of one that does.
        """
        if self._watch is not None:
            return
        lacking: WeakKeyDictionary[Optimizer, bool | None] = WeakKeyDictionary()

        def after_step(optimizer: Optimizer, *_: object) -> None:
            if self.is_updating or not self.has_gradients:
                return
            if optimizer not in lacking:
                lacking[optimizer] = lacks(optimizer)
            if lacking[optimizer] is not None:
                refuse_in_backward(optimizer)
                note()
            if lacking[optimizer]:
                text = _UNKNOWN_OPTIMIZER.format(kind=type(optimizer).__name__)
                self.report_once(text if self._own_steps else _WITHOUT_OPTIMIZER)

        vars(after_step)[OF_SESSION] = True  # it reads no weights
        self._watch = register_optimizer_step_post_hook(after_step)

    def report_without_update(self, batches: int) -> None:
        """Say what it means that an epoch ended with batches without an update. Local.

        Args:
            batches: How many there were at its end.
        """
        if self.has_gradients and batches > 0:
            self.report_once(UNUSED_GRADIENTS if self._own_steps else _WITHOUT_OPTIMIZER)
        elif batches > 1:
            self.report(_OTHER_LOADER if self.has_stepped_alone else _WITHOUT_UPDATE)

    def report_once(self, text: str) -> None:
        """Say what the user has to know, the first time."""
        if text not in self._reported:
            self._reported.add(text)
            self.report(text)

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
        if self._watch is not None:
            self._watch.remove()
        for own_step in self._own_steps:
            own_step.release()


@final
class ScriptOptimizer:
    """Redirects a script's calls of an optimizer's `step` and `zero_grad` to the session."""

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_step: "OptimizerStep",
        update: Callable[[Optimizer], None],
    ) -> None:
        """Create the script optimizer.

        Args:
            optimizer: Its methods are replaced, on this object alone.
            optimizer_step: Says when a call is the session's own, and when gradients have to stay.
            update: Updates with what `s.backward` has left; nothing before the last piece of a
                batch.
        """
        self._optimizer_step: OptimizerStep | None = optimizer_step
        self._update = update
        self._names = vars(optimizer)
        self._plain_zero_grad = optimizer.zero_grad
        # A learning-rate scheduler wraps `step` again, and wants a method for it.
        self._names["step"] = MethodType(self._step_around(optimizer.step), optimizer)
        self._zero_grad = MethodType(self._zero_around(optimizer.zero_grad), optimizer)
        self._names["zero_grad"] = self._zero_grad

    def release(self) -> None:
        """Restore the optimizer's own methods."""
        self._optimizer_step = None

    def zero_grad(self) -> Callable[..., None]:
        """Give what drops gradients: the optimizer's own, or what the script has put there since.

        The script may call the method that it found there, which does so as well.
        """
        now: Callable[..., None] = self._names["zero_grad"]
        return self._plain_zero_grad if now is self._zero_grad else now

    def _step_around(self, plain: Callable[..., object]) -> Callable[..., object]:
        @wraps(plain)
        def step(optimizer: Optimizer, *args: object, **kwargs: object) -> object:
            if self._optimizer_step is None or self._optimizer_step.is_updating:
                return plain(*args, **kwargs)
            if args or kwargs:
                raise UsageError(
                    f"{type(optimizer).__name__}.step(closure): a session runs each forward and "
                    "backward pass once; use an optimizer whose step needs no closure"
                )
            self._update(optimizer)
            return None

        vars(step)[OF_SESSION] = True
        return step

    def _zero_around(self, plain: Callable[..., None]) -> Callable[..., None]:
        @wraps(plain)
        def zero_grad(_: Optimizer, *args: object, **kwargs: object) -> None:
            if self._optimizer_step is None or not self._optimizer_step.holds_pieces:
                plain(*args, **kwargs)

        return zero_grad


def refuse_in_backward(optimizer: Optimizer) -> None:
    """Refuse an optimizer's step that comes before the workers' gradients are combined.

    Raises:
        UsageError: It comes within a backward pass.
    """
    if torch._C._current_graph_task_id() != -1:
        raise UsageError(_IN_BACKWARD.format(kind=type(optimizer).__name__))


def begin_momentum(optimizer: Optimizer) -> None:
    """Let a fused SGD's momentum begin at 0, before a first step that a loss scaler may skip.

    Its kernel would leave the momentum's memory as it finds it then, and go on from that
    (torch 2.15). From 0 the first step that counts has the same bits.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"]:
            if group["dampening"]:
                raise UsageError(
                    "torch.optim.SGD(fused=True) with dampening can't be combined with fp16: a "
                    "first step that overflows would leave its momentum unset. Leave fused out"
                )
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = torch.zeros_like(parameter.grad)
                    optimizer.state[parameter].setdefault("momentum_buffer", momentum)


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
