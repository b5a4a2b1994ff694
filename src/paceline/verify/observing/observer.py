"""Puts together what the hooks in one worker see, and writes it down as events."""

import os
import signal
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.data.batch import Batch
from paceline.distributed.device import default_generator, is_accelerator, kinds_here
from paceline.training.components import Components
from paceline.training.hooks.base import StepHook
from paceline.training.snapshots.train_state import TrainState
from paceline.verify.events import (
    Backward,
    Began,
    Combined,
    Drawn,
    Drew,
    Evaluated,
    Event,
    EventWriter,
    Figured,
    Met,
    ModeChanged,
    ModelBuilt,
    Moved,
    Normalised,
    Placed,
    Reduced,
    Stepped,
)
from paceline.verify.observing.passes import Passes
from paceline.verify.observing.perturbation import disturb_gradients, disturb_weights
from paceline.verify.observing.rng_tracking import rng_states
from paceline.verify.source_lines import caller
from paceline.verify.tensor_sketch import (
    TensorSketch,
    all_finite,
    content_hashes,
    hash_text,
    local_part,
    mark,
)
from paceline.verify.trial import EnoughSeenError, Trial

_MAX_REDUCED = 16
_MODE_COUNTS = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
SESSION_LOADER = -1
"""Stands for the loader that a session's steps are counted by."""


@final
@dataclass
class Observer:
    """Records what one worker does. It changes nothing and doesn't communicate.

    One object, since an event is told by what came before it: a step by its batch, its draws and
    its backward passes.
    """

    trial: Trial
    rank: int
    writer: EventWriter
    in_session: bool = False
    """Whether Paceline trains: it tells all, and what the hooks around see is its own."""
    steps: int = 0
    """Of the optimizer that has taken most."""
    scheduled: int = 0
    names: dict[int, str] = field(default_factory=dict)
    """Names of parameters and modules, by id."""
    roots: dict[int, nn.Module] = field(default_factory=dict)
    """Models that were built, by id."""
    autocast: torch.dtype | None = None
    place_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of a worker in the place of a process that the script spawns; else empty."""
    _optimizers: list[Optimizer] = field(default_factory=list)
    _steps_by_optimizer: list[int] = field(default_factory=list)
    """Steps of each optimizer."""
    _stepping: list[Optimizer] = field(default_factory=list)
    """Optimizers in whose step we are: one may have another one step, as that shares out states."""
    _before: tuple[TensorSketch, ...] = ()
    _gradients: tuple[TensorSketch | None, ...] = ()
    _state_before: str = ""
    _normalised: set[int] = field(default_factory=set)
    _evaluating: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By optimizer: its modules in evaluation mode at its last step, of those whose mode counts."""
    _met: set[bool] = field(default_factory=set)
    _evaluated_at: int = -1
    _has_begun: bool = False
    _batches: int = 0
    _disturbed_at: int = -1
    _dropped_at: int = -1
    _in_step: bool = False
    """Whether a forward or backward pass of the training has begun, and no step has ended it."""
    _in_wrapper: int = 0
    """How deep in DistributedDataParallel's forward pass."""
    _synced: bool | None = None
    """Whether gradients of the last forward pass through it are going to be combined."""
    _wrapped: set[int] = field(default_factory=set)
    """Modules in a DistributedDataParallel, by id."""
    _places: set[tuple[str, str]] = field(default_factory=set)
    _rng_state: str = ""
    """State of the generator after the last batch, dropout or backward pass; empty before them."""
    _backwards: int = 0
    """Backward passes since the last step."""
    _accumulates: bool = True
    """Whether the last step had several of them."""
    _frozen: dict[int, str] = field(default_factory=dict)
    """Hashes of the weights that nothing trains, at the last backward pass of this step."""
    passes: Passes = field(init=False)

    def __post_init__(self) -> None:
        self.passes = Passes(self.trial.steps, self.trial.epochs)

    @property
    def all_steps(self) -> int:
        """Steps of all optimizers together."""
        return sum(self._steps_by_optimizer)

    # Called by the hooks of script_hooks.py and dataloader_hooks.py

    def record(self, event: Event) -> None:
        """Note what a hook has seen, unless Paceline trains."""
        if not self.in_session:
            self.writer.write(event)

    def place(self, what: str, outside: Container[int] = ()) -> None:
        """Note which line of the script does something: each line once."""
        if not self.in_session and (at := caller(outside)) and (what, at) not in self._places:
            self._places.add((what, at))
            self.writer.write(Placed(what, at))

    def spawned(self, place: Mapping[str, str]) -> None:
        """Note that what the script spawns runs here."""
        self.place_variables = place

    def record_model(
        self, module: nn.Module, by: str, *, broadcasts: bool = True, prefix: str = ""
    ) -> None:
        """Note a model as this rank has built it."""
        self._name(module, prefix)
        if by != "session":
            self._wrapped.update(map(id, module.modules()))
            self.place("wrap")
        tensors = [*module.named_parameters(), *module.named_buffers()]
        hashes = {prefix + n: mark(t, whole=False).sha256 for n, t in tensors}
        shapes = {prefix + n: str(tuple(t.shape)) for n, t in tensors}
        self.writer.write(ModelBuilt(hashes, shapes, by, broadcasts))

    def before_backward(self, loss: Tensor) -> None:
        """Note a backward pass of a plain script.

        Raises:
            EnoughSeenError: It begins one epoch more than are wanted.
        """
        if loss.numel() == 1 and not self.in_session:
            fed = self.passes.backward()
            self._begin()
            self.record_draws()
            self._note_moved()
            self.record(
                Backward(_number(loss), synced=self._synced, fed=fed, adds=self._adds(loss))
            )
            self.place("backward")
            self._in_step, self._synced = True, None

    def _adds(self, loss: Tensor) -> bool:
        """Return whether a backward pass adds to gradients that aren't zero."""
        held = [p for p in self._weights() if p.grad is not None]
        reached = set(_leaves(loss)) if held else ()
        return any(id(p) in reached and _is_nonzero(p.grad) for p in held)

    def _note_moved(self) -> None:
        """Note weights that nothing trains, and that changed since the last backward pass."""
        # They are hashed where steps have several backward passes, the first step's included.
        if self._backwards or self._accumulates:
            trained = {id(p) for own in self._optimizers for p in _parameters(own)}
            frozen = [p for p in self._weights() if not (p.requires_grad or id(p) in trained)]
            now = {id(p): mark(p, whole=False).sha256 for p in frozen}
            moved = [n for n, sha in now.items() if self._frozen.get(n, sha) != sha]
            if moved:
                self.record(Moved(tuple(self.names.get(n, "") for n in moved), caller()))
            self._frozen = now
        self._backwards += 1

    def _weights(self) -> list[Tensor]:
        """List the parameters of all models and optimizers, each once."""
        found = [p for own in self._optimizers for p in _parameters(own)]
        found += [p for root in self.roots.values() for p in root.parameters()]
        return list({id(p): p for p in found}.values())

    def before_step(self, optimizer: Optimizer) -> None:
        """Note the gradients that an optimizer is about to use."""
        if optimizer in self._stepping:  # its last step has failed
            del self._stepping[self._stepping.index(optimizer) :]
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            return
        self.passes.backward()  # where gradients come from torch.autograd.grad
        number = self.number_of(optimizer)
        self.place("step")
        whole = self.rank == 0
        parameters = _parameters(optimizer)
        self._record_modes(number, parameters)
        if self.trial.disturbed:
            disturb_gradients(parameters, self._steps_by_optimizer[number], self.autocast)
        # The weights before the first step show whether both launches began alike.
        first = self._steps_by_optimizer[number] == 0
        self._before = tuple(mark(p, whole=whole) for p in parameters) if first else ()
        self._state_before = self._state_of(optimizer) if first else ""
        self._gradients = tuple(
            None if p.grad is None else mark(p.grad, whole=whole) for p in parameters
        )

    def after_step(self, optimizer: Optimizer) -> None:
        """Note the new weights."""
        del self._stepping[self._stepping.index(optimizer) :]
        if self._stepping:
            return
        number, parameters = self.number_of(optimizer), _parameters(optimizer)
        self._steps_by_optimizer[number] += 1
        # Several optimizers may take turns: the busiest one counts the steps.
        if self.steps < max(self._steps_by_optimizer):
            self.steps += 1
            self.passes.step()
        self._in_step = False
        self._backwards, self._accumulates, self._frozen = 0, self._backwards > 1, {}
        whole = self.rank == 0
        stepped = Stepped(
            optimizer=number,
            names=self._names_of(optimizer),
            before=self._before,
            gradients=self._gradients,
            weights=tuple(mark(p, whole=whole) for p in parameters),
            buffers=self._buffers(),
            rates=tuple(float(group["lr"]) for group in optimizer.param_groups),
            scheduled=self.scheduled,
            state_before=self._state_before,
            state=self._state_of(optimizer),
        )
        self.writer.write(stepped)
        if self.all_steps == self.trial.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)  # as a host does that is lost

    def before_forward(self, module: nn.Module) -> None:
        """Note BatchNorm that sees a share only, and models about to be judged."""
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            self._note_batchnorm(module)
        if module.training and torch.is_grad_enabled():
            self._note_forward(module)
        if id(module) not in self.names and not isinstance(module, DistributedDataParallel):
            self._name(module)  # what is called first is the outermost
        if id(module) not in self.roots:
            return
        self.passes.forward(with_gradients=torch.is_grad_enabled())
        # Gradients are disturbed by the rounding of the type that is computed in.
        for device in kinds_here():
            if torch.is_autocast_enabled(device):
                self.autocast = torch.get_autocast_dtype(device)
        if module.training and self.trial.disturbed and self._disturbed_at != self._batches:
            self._disturbed_at = self._batches  # no graph is open when a batch has just come
            for root in self.roots.values():
                disturb_weights(root.parameters(), self._batches)
        # Buffers are compared where they count: once for each evaluation.
        if not module.training and self._evaluated_at != self.steps:
            self._evaluated_at = self.steps
            self.record(Evaluated(self._buffers()))

    def wrapper_entered(self, *, synced: bool) -> None:
        """Note that a forward pass through DistributedDataParallel begins."""
        self._in_wrapper += 1
        self._synced = synced
        if not synced:
            self.place("unsynced")

    def wrapper_left(self) -> None:
        """Note that it has ended."""
        self._in_wrapper -= 1

    def before_dropout(self, given: Tensor) -> None:
        """Note which numbers the first dropout of a step is going to draw."""
        if self._dropped_at != self.steps:
            self._dropped_at = self.steps
            state = rng_states()["torch"]
            if is_accelerator(given.device):
                drawn = default_generator(given.device).get_state()
                state = mark(drawn, whole=False).sha256
            self.writer.write(Drew("dropout", state, self.steps))

    def after_batch(self) -> None:
        """Begin anew: a batch has come."""
        self._begin()
        self._batches += 1
        self.after_draw()

    def after_draw(self) -> None:
        """Remember which random numbers come next: whoever draws them now is the script itself."""
        self._rng_state = rng_states()["torch"]

    def reduced(self, operation: str, before: Tensor, after: Tensor) -> None:
        """Note what a script combines over the ranks, where it is small."""
        if before.numel() <= _MAX_REDUCED and not before.is_complex():
            self.record(Reduced(operation, _numbers(before), _numbers(after)))

    def parameter_registered(self, module: nn.Module) -> None:
        """Note a parameter that DistributedDataParallel, made before, doesn't know."""
        if id(module) in self._wrapped:
            self.place("late")

    def combined(self, tensor: Tensor) -> None:
        """Note that a script combines gradients by itself."""
        if self._in_step and tensor.ndim:
            self.record(Combined())

    def communicated(self, name: str) -> None:
        """Note a collective call that has ended."""
        self.meet(joined_only=False)
        if self._in_step:
            self.place("collective")
        elif "gather" in name:
            self.place("gathered")

    def meet(self, *, joined_only: bool) -> None:
        """Note that this rank has joined the others or communicates with them."""
        if joined_only not in self._met:
            self._met.add(joined_only)
            self.record(Met(joined_only))

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.writer.write(Began(time.monotonic()))

    def record_draws(self) -> None:
        """Note where random numbers were drawn since the last batch, dropout or backward pass."""
        state = rng_states()["torch"]
        if self._rng_state not in ("", state):
            self.writer.write(Drew("step", self._rng_state, self.steps))
        self._rng_state = state  # a step may have several backward passes, and draw between them

    def _record_modes(self, optimizer: int, parameters: Iterable[Tensor]) -> None:
        """Note which modules train in evaluation mode; not those of models that are only judged."""
        updated = set(map(id, parameters))
        found = tuple(
            dict.fromkeys(
                f"the {type(part).__name__} {self.names.get(id(part), '')}".strip()
                for root in self.roots.values()
                if not updated.isdisjoint(map(id, root.parameters()))
                for part in root.modules()
                if isinstance(part, _MODE_COUNTS) and not part.training
            )
        )
        if found != self._evaluating.get(optimizer, ()):
            self._evaluating[optimizer] = found
            self.writer.write(ModeChanged(optimizer, self._steps_by_optimizer[optimizer], found))

    def _name(self, module: nn.Module, prefix: str = "") -> None:
        self.roots[id(module)] = module
        for name, parameter in module.named_parameters():
            self.names[id(parameter)] = prefix + name
        for name, part in module.named_modules():
            self.names[id(part)] = prefix + name

    def _note_forward(self, module: nn.Module) -> None:
        """Note a forward pass to be trained on, and one that goes by the wrapper."""
        if id(module) in self.roots:
            self._in_step = True
        # A checkpointed part is run again in the backward pass, outside of its wrapper.
        is_again = torch._C._current_graph_task_id() != -1
        if id(module) in self._wrapped and not (self._in_wrapper or is_again):
            self.place("bypass", outside=self._wrapped)

    def _note_batchnorm(self, module: nn.Module) -> None:
        if id(module) not in self._normalised and not isinstance(module, nn.SyncBatchNorm):
            self._normalised.add(id(module))
            name = self.names.get(id(module)) or type(module).__name__
            self.writer.write(Normalised(name, 0))

    def _buffers(self) -> dict[str, str]:
        return {
            name: mark(buffer, whole=False).sha256
            for root in self.roots.values()
            for name, buffer in root.named_buffers()
        }

    def _state_of(self, optimizer: Optimizer) -> str:
        """Hash what an optimizer remembers of its parameters, in their order."""
        if not self.trial.notes_state:
            return ""
        states = [_described(optimizer.state.get(p, {})) for p in _parameters(optimizer)]
        return hash_text("\n".join(states)) if any(states) else ""

    def number_of(self, optimizer: Optimizer) -> int:
        """Number an optimizer in the order in which they come."""
        for number, known in enumerate(self._optimizers):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        self._steps_by_optimizer.append(0)
        return len(self._optimizers) - 1

    def _names_of(self, optimizer: Optimizer) -> tuple[str, ...]:
        return tuple(
            self.names.get(id(parameter), f"parameter {place} of group {number}")
            for number, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        )


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


def _is_nonzero(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    own = local_part(gradient)
    return bool((own.coalesce().values() if own.is_sparse else own).any())


def _described(state: Mapping[str, object]) -> str:
    """Write a parameter's state as text, its tensors as hashes; empty where there is none."""
    values = [(n, state[n]) for n in sorted(state) if state[n] is not None]
    return ";".join(
        f"{n}={mark(v, whole=False).sha256 if isinstance(v, Tensor) else v!r}" for n, v in values
    )


def _number(loss: Tensor) -> float:
    return float(loss.detach().item())


def _numbers(tensor: Tensor) -> tuple[float, ...]:
    values: Iterable[float] = tensor.detach().cpu().double().reshape(-1).tolist()
    return tuple(values)


@final
class SessionHook(StepHook):
    """Notes for an observer what Paceline's own session trains."""

    def __init__(self, observer: Observer) -> None:
        """Create the session hook.

        Args:
            observer: Of this worker.
        """
        self._observer = observer
        self._position = TrainState()

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Store what is trained."""
        self._position = position
        observer, models = self._observer, components.models
        observer.in_session = True
        for name, model in models.items():
            observer.record_model(model, "session", prefix="" if len(models) == 1 else f"{name}.")
        for optimizer in components.optimizers:
            observer.number_of(optimizer)

    def begin_step(self, step: int, batch: Batch | None) -> None:
        """Note what is about to be trained on; ends the training once enough was seen."""
        if batch is None:
            return
        epoch = self._position.epoch
        if epoch >= self._observer.trial.epochs:
            raise EnoughSeenError
        samples = tuple(str(int(index)) for index in batch.indices)
        contents = content_hashes(batch.content, len(samples)) if samples else ()
        drawn = Drawn(SESSION_LOADER, epoch, samples, contents, True, batch.total, batch.part)
        drawn = replace(drawn, finite=all_finite(batch.content))
        self._observer.writer.write(drawn)
        self._observer.after_batch()

    def before_backward(self, loss: Tensor, weight: float) -> None:
        """Note a backward pass."""
        self._observer.record_draws()
        fed = ((SESSION_LOADER, self._position.epoch),)
        self._observer.writer.write(Backward(_number(loss), weight, fed=fed))

    def after_evaluation(self, metrics: Mapping[str, float], samples: int) -> None:
        """Note an evaluation's figures."""
        self._observer.writer.write(Figured(dict(metrics), samples))
