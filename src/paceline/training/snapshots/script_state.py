"""State that a script registers with `s.keep`: saved in snapshots, shared or per worker."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Protocol, final, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.state_encoding import decode, encode
from paceline.errors import SnapshotError, UsageError
from paceline.training.snapshots.per_worker_states import RankState

State = tuple[object, dict[str, Tensor]]
"""A copy of a state: JSON, and the tensors in it."""
_MOST_COPIED = 2**30
"""Bytes of an object's state of which a loop's beginning and end have a copy: an average of large
weights, say, has none."""
_PER_WORKER = "s.keep(..., per_worker=True)"


@final
class KeptValues:
    """Values by name, as attributes: `kept = s.keep(best=0.0)`, then `kept.best = ...`."""

    def __init__(self, values: Mapping[str, object]) -> None:
        """Create the kept values.

        Args:
            values: What they are at the beginning of a training.
        """
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:  # whatever the script has put there
        raise AttributeError(f"nothing is kept as {name!r}: s.keep({name}=...) names it")

    def __setattr__(self, name: str, value: Any) -> None:  # likewise
        vars(self)[name] = value

    def state_dict(self) -> Mapping[str, object]:
        """Give the values."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        """Take values over."""
        vars(self).update(state_dict)


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state can be taken out and put back."""

    def state_dict(self) -> Mapping[str, object]:
        """Give the state: tensors, numbers, text, None, in lists, tuples and dictionaries."""

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take a state over."""


@final
class LoopState:
    """A copy of what a script's loop changes besides weights: options of optimizers, kept objects.

    Options are learning rates, weight decay and the like; the objects are schedulers, and what
    `s.keep` has for all workers alike.
    """

    def __init__(self, optimizers: Sequence[Optimizer], objects: Mapping[str, Stateful]) -> None:
        """Copy what they are now. Local to the worker.

        Args:
            objects: By the names that snapshots have.
        """
        self._optimizers = optimizers
        self._objects = objects
        self._options = _options_of(optimizers)
        copies = {name: _host_copy(one.state_dict(), name) for name, one in objects.items()}
        self.states = {name: copy for name, copy in copies.items() if copy is not None}
        """The objects' states in the host's memory, by name; without those that are large."""

    @contextmanager
    def in_options(self) -> Iterator[None]:
        """Give the optimizers the options of this copy for a block. Local to the worker."""
        now = [[dict(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._set(self._options)
        try:
            yield
        finally:
            self._set(now)

    def put_back(self, leave: Sequence[Optimizer] = ()) -> list[str]:
        """Undo what the script has changed since. Local to the worker.

        Returns:
            The names of what has been changed.
        """
        options = _options_of(self._optimizers)
        names = [
            key
            for optimizer, own, before in zip(self._optimizers, options, self._options, strict=True)
            if not any(optimizer is one for one in leave)
            for now, then in zip(own, before, strict=False)
            for key in now
            if not _alike(then.get(key), now[key])
        ]
        self._set(self._options, leave)
        # Only these: with its state an object may take a place anew that it has left on purpose.
        for name, state in self.states.items():
            one = self._objects[name]
            if (now := _host_copy(one.state_dict(), name)) is None or not _equal(state, now):
                one.load_state_dict(decode(*state))  # type: ignore[arg-type]  # as saved
                names.append(name)
        return list(dict.fromkeys(names))

    def _set(
        self,
        options: Sequence[Sequence[Mapping[str, object]]],
        leave: Sequence[Optimizer] = (),
    ) -> None:
        for optimizer, groups in zip(self._optimizers, options, strict=True):
            if any(optimizer is one for one in leave):
                continue
            for group, own in zip(optimizer.param_groups, groups, strict=False):
                group.update(own)


@final
class PerPartState:
    """State objects with one state for each part of a step: each shard, or else each worker.

    One at a time is in the registered objects: that of the part which is gone through.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        """With state_dict and load_state_dict, by name."""
        self._own_parts: tuple[int, ...] = ()
        self._states: dict[int, State] = {}
        """States of the parts that the objects don't hold now."""
        self._now = -1
        """The part whose state is in the objects."""
        self._left: State | None = None
        """What was in the objects when the last step ended."""
        self._resumed: State | None = None
        """What a snapshot taken within an epoch has put into the objects."""

    def begin(self, parts: Iterable[int]) -> None:
        """Give all parts of this worker the state that is in the objects. Local to the worker."""
        self._own_parts = tuple(parts)
        self._now = self._own_parts[0]
        self._states = {part: self._copy() for part in self._own_parts[1:]}
        self._left = None

    def note_resumed(self) -> None:
        """Remember what is in the objects now, for `put_back`. Local."""
        self._resumed = self._copy()

    def put_back(self) -> None:
        """Undo what the script has changed since `note_resumed`. Local."""
        if self._resumed is not None:
            self._put(self._resumed)
        self._resumed = None

    def begin_step(self) -> None:
        """Apply what the script has changed between two passes to all parts. Local."""
        if self._left is not None and not _equal(self._left, self._copy()):
            self.begin(self._own_parts)

    def enter(self, part: int) -> None:
        """Put a part's state into the objects. Local to the worker."""
        if not self.objects or part == self._now:
            return
        self._states[self._now] = self._copy()
        self._put(self._states.pop(part))
        self._now = part

    def end_step(self) -> None:
        """Note what the last part has left. Local to the worker."""
        if len(self._own_parts) > 1 and self.objects:
            self._left = self._copy()

    def own(self) -> RankState:
        """Give the states of this worker's parts, for a snapshot."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, object] = {}
        for part in self._own_parts:
            json, named = self._copy() if part == self._now else self._states[part]
            values[str(part)] = json
            tensors |= {f"{part}{name}": tensor for name, tensor in named.items()}
        return RankState(tensors=tensors, values=values)

    def restore(
        self, values: Mapping[str, object], tensors: Mapping[str, Tensor], parts: object, now: int
    ) -> None:
        """Give this worker's parts their states back. Local to the worker.

        Args:
            values: Of all parts, as `own` gave them.
            tensors: Likewise.
            parts: How many the snapshot has.
            now: How many there are.

        Raises:
            SnapshotError: There are other parts now, or other states.
        """
        if not (self.objects or values):
            return
        names = ", ".join(self.objects) or "nothing"
        # Check that the snapshot has the same parts with the same states.
        if parts != now and self.objects:
            raise SnapshotError(
                f"{_PER_WORKER} holds a state of each worker for itself ({names}), and the "
                f"snapshot has those of {parts}, while there are {now} now. Resume with {parts}, "
                "or train with --shards, where each shard has its own on any number of workers"
            )
        if set(values) != set(map(str, range(now))):
            raise SnapshotError(
                f"{_PER_WORKER}: the snapshot has the states of {len(values)} parts, and the "
                f"script keeps {names}"
            )
        # Give the open part its state now; the others get theirs when they are opened.
        found: dict[int, State] = {}
        for part in self._own_parts:
            start = f"{part}/"
            named = {n[len(start) - 1 :]: t for n, t in tensors.items() if n.startswith(start)}
            found[part] = values[str(part)], named
        self._put(found.pop(self._now))
        self._states = found

    def _copy(self) -> State:
        return _copied({name: one.state_dict() for name, one in self.objects.items()})

    def _put(self, state: State) -> None:
        states = decode(*state)
        if not isinstance(states, dict) or states.keys() != self.objects.keys():
            raise SnapshotError(f"{_PER_WORKER}: the snapshot has other states than the script")
        for name, one in self.objects.items():
            one.load_state_dict(states[name])


def check_given(part: object, name: str | None, values: Mapping[str, object]) -> None:
    """Check what `s.keep` is called with.

    Raises:
        UsageError: It is neither one object with a name nor values by name.
    """
    if part is None and not values:
        raise UsageError("s.keep takes an object, s.keep(part, name='...'), or values: s.keep(x=0)")
    if part is not None and (values or name is None):
        raise UsageError("s.keep(part, name='...') takes one object and its name, and no values")


def _options_of(optimizers: Sequence[Optimizer]) -> list[list[dict[str, object]]]:
    return [
        [
            {key: _copy_of(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def _copy_of(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else copy(value)


def _alike(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_values(one, other)
    return one == other


def _copied(state: Mapping[str, object]) -> State:
    tensors: dict[str, Tensor] = {}
    json = encode(state, "", tensors)
    return json, {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _host_copy(state: Mapping[str, object], path: str) -> State | None:
    """Copy a state into the host's memory; None where it is large."""
    tensors: dict[str, Tensor] = {}
    json = encode(state, path, tensors)
    if sum(tensor.nbytes for tensor in tensors.values()) > _MOST_COPIED:
        return None
    return json, {n: tensor.detach().to("cpu", copy=True) for n, tensor in tensors.items()}


def _equal(one: State, other: State) -> bool:
    names = one[1].keys()
    if one[0] != other[0] or names != other[1].keys():
        return False
    return all(same_values(one[1][name], other[1][name]) for name in names)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors of one device hold the same; NaN is the same as NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    is_same = one == other
    if one.is_floating_point():
        is_same |= one.isnan() & other.isnan()
    return bool(is_same.all())
