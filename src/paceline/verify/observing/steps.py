"""Observes backward passes and optimizers: losses, gradients, weights, states."""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from paceline.verify.events import Backward, Moved, Stepped
from paceline.verify.observing.observer import Observer
from paceline.verify.observing.perturbation import disturb_gradients
from paceline.verify.source_lines import caller
from paceline.verify.tensor_sketch import TensorSketch, hash_tensor, hash_text, local_part, mark
from paceline.verify.trial import EnoughSeenError


@final
@dataclass
class StepWatch:
    """Reports backward passes and steps to an observer.

    Several optimizers may take turns: the busiest one counts the steps.
    """

    observer: Observer
    synced: bool | None = None
    """Whether gradients of the last forward pass through DistributedDataParallel are combined."""
    scheduled: int = 0
    """Steps of schedules."""
    steps: Counter[int] = field(default_factory=Counter)
    """Steps of each optimizer."""
    _optimizers: dict[Optimizer, int] = field(default_factory=dict)
    """Numbered in the order in which they come."""
    _stepping: Optimizer | None = None
    """In whose step we are: it may have others step, as one does that shares out states."""
    _before: tuple[TensorSketch, ...] = ()
    _gradients: tuple[TensorSketch | None, ...] = ()
    _state_before: str = ""
    """Of the optimizer's state, hashed, before its first step."""
    _backwards: int = 0
    """Backward passes since the last step."""
    _accumulates: bool = True
    """Whether the last step had several of them."""
    _frozen: dict[int, str] = field(default_factory=dict)
    """Hashes of the weights that nothing trains, at the last backward pass of this step."""

    def before_backward(self, loss: Tensor, *_: object, **__: object) -> None:
        """Note a backward pass of a plain script."""
        observer = self.observer
        if loss.numel() > 1 or observer.in_session:
            return
        fed = observer.use_batches()
        observer.begin()
        observer.record_draws()
        self._note_moved()
        value = float(loss.detach().item())
        observer.record(Backward(value, synced=self.synced, fed=fed, adds=self._adds(loss)))
        observer.place("backward")
        observer.in_step, self.synced = True, None

    def _adds(self, loss: Tensor) -> bool:
        """Return whether a backward pass adds to gradients that aren't zero."""
        held = [(id(p), p.grad) for p in self._weights() if p.grad is not None]
        reached = set(_leaves(loss)) if held else ()
        return any(n in reached and bool(local_part(grad).norm()) for n, grad in held)

    def _note_moved(self) -> None:
        """Note weights that nothing trains, and that changed since the last backward pass."""
        # They are hashed where steps have several backward passes, the first step's included.
        if self._backwards or self._accumulates:
            trained = {id(p) for own in self._optimizers for p in _parameters(own)}
            known = [p for p in self._weights() if trained or not p.requires_grad]
            frozen = [p for p in known if p.grad is None and id(p) not in trained]
            now = {id(p): hash_tensor(p.detach().clone()) for p in frozen}  # FSDP resizes its own
            moved = [n for n, sha in now.items() if self._frozen.get(n, sha) != sha]
            if moved:
                names = tuple(self.observer.names.get(n, "") for n in moved)
                self.observer.record(Moved(names, caller()))
            self._frozen = now
        self._backwards += 1

    def _weights(self) -> list[Tensor]:
        """List the parameters of all models and optimizers, each once."""
        found = [p for own in self._optimizers for p in _parameters(own)]
        found += [p for root in self.observer.roots.values() for p in root.parameters()]
        return list({id(p): p for p in found}.values())

    def before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note the gradients that an optimizer is about to use.

        Raises:
            EnoughSeenError: There is no DataLoader whose passes could be counted.
        """
        observer = self.observer
        trial = observer.trial
        found_inf = getattr(optimizer, "found_inf", None)  # a fused one skips the step by itself
        if self._is_dry(optimizer) or (isinstance(found_inf, Tensor) and found_inf.any()):
            return
        if observer.steps >= trial.steps * (trial.epochs + 1):
            raise EnoughSeenError
        if self._stepping not in (None, optimizer):  # itself where its last step has failed
            return
        self._stepping = optimizer
        observer.place("step")
        number = self._optimizers.setdefault(optimizer, len(self._optimizers))
        parameters = _parameters(optimizer)
        if trial.disturbed:
            disturb_gradients(parameters, self.steps[number], observer.autocast)
        # The weights before the first step show whether both launches began alike.
        is_first = self.steps[number] == 0
        self._before = self._sketches(parameters) if is_first else ()
        self._state_before = self._state_of(optimizer) if is_first else ""
        whole = observer.rank == 0
        self._gradients = tuple(
            None if p.grad is None else mark(p.grad, whole=whole) for p in parameters
        )

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Note the new weights."""
        if optimizer is not self._stepping:
            return
        observer, number, self._stepping = self.observer, self._optimizers[optimizer], None
        observer.use_batches()  # where gradients come from torch.autograd.grad
        self.steps[number] += 1
        if observer.steps < self.steps[number]:
            observer.steps += 1
            observer.passes.step()
        observer.in_step = False
        self._backwards, self._accumulates, self._frozen = 0, self._backwards > 1, {}
        stepped = Stepped(
            optimizer=number,
            names=tuple(self._names_of(optimizer)),
            before=self._before,
            gradients=self._gradients,
            weights=self._sketches(_parameters(optimizer)),
            buffers=observer.buffers(),
            rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
            scheduled=self.scheduled,
            state_before=self._state_before,
            state=self._state_of(optimizer),
        )
        observer.writer.write(stepped)
        observer.kept = observer.writer.size
        if self.steps.total() == observer.trial.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)  # as a host does that is lost

    def _is_dry(self, optimizer: Optimizer) -> bool:
        """Return whether a step only makes states to load into, as torch.distributed.checkpoint's.

        Its learning rate is 0, and no backward pass came before.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        return not (self._backwards or self.observer.in_session or any(rates))

    def _sketches(self, tensors: Sequence[Tensor]) -> tuple[TensorSketch, ...]:
        return tuple(mark(tensor, whole=self.observer.rank == 0) for tensor in tensors)

    def _state_of(self, optimizer: Optimizer) -> str:
        """Hash what an optimizer remembers of its parameters, in their order."""
        if not self.observer.trial.notes_state:
            return ""
        states = [_described(optimizer.state.get(p, {})) for p in _parameters(optimizer)]
        return hash_text("\n".join(states)) if any(states) else ""

    def _names_of(self, optimizer: Optimizer) -> Iterator[str]:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                name = self.observer.names.get(id(parameter))
                yield name or f"parameter {place} of group {number}"


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _leaves(loss: Tensor) -> Iterator[int]:
    """Return the ids of the parameters that a backward pass reaches."""
    waiting, seen = [loss.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += (following for following, _ in node.next_functions)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield id(leaf)


def _described(state: Mapping[str, object]) -> str:
    """Write a parameter's state as text, its tensors as hashes; empty where there is none."""
    values = [(n, state[n]) for n in sorted(state) if state[n] is not None]
    return ";".join(
        f"{n}={hash_tensor(v) if isinstance(v, Tensor) else repr(v)}" for n, v in values
    )
