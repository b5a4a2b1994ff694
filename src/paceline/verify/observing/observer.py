"""Writes down as events what the hooks in one worker see."""

import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.device import default_generator, is_accelerator, kinds_here
from paceline.verify.events import (
    Began,
    Drew,
    Evaluated,
    Event,
    EventWriter,
    Met,
    ModelBuilt,
    Normalised,
    Placed,
)
from paceline.verify.observing.passes import Passes
from paceline.verify.observing.perturbation import disturb_weights
from paceline.verify.observing.rng_tracking import rng_states
from paceline.verify.source_lines import caller, is_within
from paceline.verify.tensor_sketch import hash_tensor
from paceline.verify.trial import EnoughSeenError, Trial


@final
@dataclass
class Observer:
    """Records what one worker does: its models, their forward passes, draws and communication."""

    trial: Trial
    rank: int
    writer: EventWriter
    in_session: bool = False
    """Whether Paceline trains: it tells all, and what the hooks around see is its own."""
    steps: int = 0
    """Of the optimizer that has taken most."""
    in_step: bool = False
    """Whether a forward or backward pass of the training has begun, and no step has ended it."""
    names: dict[int, str] = field(default_factory=dict)
    """Names of parameters and modules, by id."""
    roots: dict[int, nn.Module] = field(default_factory=dict)
    """Models that were built, by id."""
    autocast: torch.dtype | None = None
    """The type that forward passes are computed in, if it is another one than the weights'."""
    place_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of a worker in the place of a process that the script spawns; else empty."""
    in_wrapper: int = 0
    """How deep in DistributedDataParallel's forward pass."""
    passes: Passes = field(init=False)
    kept: int = 0
    """Size of the events up to the newest pass's begin, or to the newest step."""
    _batches: int = 0
    _wrapped: set[int] = field(default_factory=set)
    """Modules in a DistributedDataParallel, by id."""
    _noted: set[object] = field(default_factory=set)
    """What was written down, of what is written only once."""
    _rng_state: str = ""
    """State of the generator after the last batch, dropout or backward pass; empty before them."""

    def __post_init__(self) -> None:
        self.passes = Passes(self.trial.steps, self.trial.epochs)

    def record(self, event: Event) -> None:
        """Note what a hook has seen, unless Paceline trains."""
        if not self.in_session:
            self.writer.write(event)

    def is_first(self, *what: object) -> bool:
        """Return whether something is seen for the first time."""
        is_first = what not in self._noted
        self._noted.add(what)
        return is_first

    def place(self, what: str, outside: Container[int] = ()) -> None:
        """Note which line of the script does something: each line once."""
        if not self.in_session and (at := caller(outside)) and self.is_first(what, at):
            self.writer.write(Placed(what, at))

    @property
    def has_begun(self) -> bool:
        """Whether a batch has come, or a backward pass begun."""
        return ("began",) in self._noted

    def begin(self) -> None:
        """Note the training's first batch or backward pass."""
        if self.is_first("began"):
            self.writer.write(Began(time.monotonic()))

    # Models

    def add_model(self, module: nn.Module, prefix: str = "") -> None:
        """Know a model's parameters and modules by their names."""
        self.roots[id(module)] = module
        for name, part in (
            *module.named_parameters(prefix),
            *module.named_modules(prefix=prefix),
        ):
            self.names[id(part)] = name

    def record_model(
        self, module: nn.Module, by: str, *, broadcasts: bool = True, prefix: str = ""
    ) -> None:
        """Note a model as this rank has built it."""
        self.add_model(module, prefix)
        if by != "session":
            self._wrapped.update(map(id, module.modules()))
            self.place("wrap")
        frozen = tuple(n for n, p in module.named_parameters(prefix) if not p.requires_grad)
        self.writer.write(ModelBuilt(by, broadcasts, frozen))

    def parameter_registered(self, module: nn.Module) -> None:
        """Note a parameter that DistributedDataParallel, made before, doesn't know."""
        if id(module) in self._wrapped:
            self.place("late")

    def buffers(self) -> dict[str, str]:
        """Hash the buffers of all models."""
        named = (pair for root in self.roots.values() for pair in root.named_buffers())
        return {name: hash_tensor(buffer) for name, buffer in named}

    # Forward passes

    def before_forward(self, module: nn.Module) -> None:
        """Note a forward pass, of a whole model or of a part."""
        if module.training and isinstance(module, nn.modules.batchnorm._BatchNorm):
            is_own = not isinstance(module, nn.SyncBatchNorm)
            if is_own and self.is_first("normalised", id(module)):
                name = self.names.get(id(module)) or type(module).__name__
                self.writer.write(Normalised(name))
        trains = module.training and torch.is_grad_enabled()
        # A checkpointed part is run again in the backward pass, outside of its wrapper.
        is_again = torch._C._current_graph_task_id() != -1
        if trains and id(module) in self._wrapped and not (self.in_wrapper or is_again):
            self.place("bypass", outside=self._wrapped)
        self.in_step |= trains and id(module) in self.roots
        if id(module) not in self.names and not isinstance(module, DistributedDataParallel):
            self.add_model(module)  # what is called first is the outermost
        if id(module) in self.roots:
            self._before_model(module)

    def _before_model(self, module: nn.Module) -> None:
        self.passes.forward(with_gradients=torch.is_grad_enabled())
        for device in kinds_here():
            if torch.is_autocast_enabled(device):
                self.autocast = torch.get_autocast_dtype(device)
        # No graph is open when a batch has just come.
        if module.training:
            if self.trial.disturbed and self.is_first("disturbed", self._batches):
                for root in self.roots.values():
                    disturb_weights(root.parameters(), self._batches)
        # Buffers are compared where they count: once for each evaluation.
        elif self.is_first("evaluated", self.steps):
            models = self.roots.values() if self.trial.notes_state else ()
            weights = {id(p): p for root in models for p in root.parameters()}
            own = {name: hash_tensor(buffer) for name, buffer in module.named_buffers()}
            self.record(Evaluated(own, tuple(map(hash_tensor, weights.values()))))

    # Batches and random numbers

    def use_batches(self) -> tuple[tuple[int, int], ...]:
        """Return the passes that feed a backward pass, or a step without one.

        Raises:
            EnoughSeenError: It begins one epoch more than are wanted, of which nothing is kept.
        """
        try:
            return self.passes.backward()
        except EnoughSeenError:
            self.writer.forget(self.kept)
            raise

    def batch_came(self) -> None:
        """Reset what is known since the last batch."""
        self.begin()
        self._batches += 1
        self.remember_draws()

    def before_dropout(self, given: Tensor) -> None:
        """Note which numbers the first dropout of a step is going to draw."""
        if self.is_first("dropout", self.steps):
            state = rng_states()["torch"]
            if is_accelerator(given.device):
                state = hash_tensor(default_generator(given.device).get_state())
            self.writer.write(Drew("dropout", state, self.steps))

    def remember_draws(self) -> None:
        """Remember which random numbers come next: only the script itself draws them now."""
        self._rng_state = rng_states()["torch"]

    def record_draws(self) -> None:
        """Note where random numbers were drawn since the last batch, dropout or backward pass."""
        before = self._rng_state
        self.remember_draws()  # a step may have several backward passes, and draw between them
        if before not in ("", self._rng_state):
            self.writer.write(Drew("step", before, self.steps))

    # Communication

    def communicated(self, name: str) -> None:
        """Note a collective call that has ended."""
        self.meet(joined_only=False)
        if self.in_step:
            self.place("collective")
        elif "reduce" in name:
            self.place("reduced")
        elif "gather" in name:
            self.place("gathered for metrics" if is_within("gather_for_metrics") else "gathered")

    def meet(self, *, joined_only: bool) -> None:
        """Note that this rank has joined the others or communicates with them."""
        if self.is_first("met", joined_only):
            self.record(Met(joined_only))
