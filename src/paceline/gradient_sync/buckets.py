"""Buckets: flat buffers in which gradients of several parameters are added and sent together."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from typing import Generic, TypeVar, final

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.gradient_sync.ordered.reduction_tree import TreeSum

K = TypeVar("K")
_GRADIENT, _IS_TRAINED = attrgetter("grad"), attrgetter("requires_grad")

ALIGNMENT = 16
"""Elements to which a worker's slice is rounded up: 64 bytes of fp32."""
FIRST_BYTES = 1 << 20
"""The bucket that is complete first; a small one starts the exchange early (DDP has the same)."""
MAX_BYTES = 25 << 20
"""DDP's bucket size."""
SLICE_BYTES = 40 << 10
"""What one worker sends another of a full bucket, at least, for each worker that there is: every
message costs each of the others some time, and `ordered/chunk_tuner.py` finds out whether smaller
ones gain more than they cost. Chosen over Gloo with 11 MB of gradients on 2, 4 and 8 workers of one
machine (`benchmarks/ordered.py`)."""
BETWEEN_NODES = 12
"""Buckets, or pieces of large ones: what `ordered/chunk_tuner.py` begins with and cuts further. The
exchange of each has two stages, and with many of them the second one's of one hides behind the next
one's first."""
WITHIN_NODE = 4
"""The same where no network is in between, or leaders exchange for all workers of their nodes: each
costs about 0.4 ms of a core's time with Gloo, and there is little to hide."""


MIN_BYTES_WITHIN_NODE = 1 << 20
"""Below this a bucket's words cost more than its additions."""


@final
class Arrivals(Generic[K]):
    """Notes which parameters get a gradient in backward passes.

    Its hooks only append to a list, which runs no Python; who wants to look meanwhile says where.
    """

    def __init__(self, parameters: Mapping[K, nn.Parameter]) -> None:
        """Create the arrivals.

        Args:
            parameters: By what `take` is to give.
        """
        self._parameters = parameters
        self._key_of = {id(parameter): key for key, parameter in parameters.items()}
        self._noted: list[Tensor] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._noted.append)
            for parameter in parameters.values()
        ]

    def __bool__(self) -> bool:
        """Whether any has got one since the last `take`."""
        return bool(self._noted)

    def take(self) -> tuple[K, ...]:
        """Give those that have got one since, in that order, as often as they did."""
        keys = tuple(self._key_of[id(parameter)] for parameter in self._noted)
        self._noted.clear()
        return keys

    def clear(self) -> None:
        """Forget those that have got one since."""
        self._noted.clear()

    def look(self, look: Callable[[], None], keys: Iterable[K]) -> None:
        """Have this called in backward passes, as these parameters have got a gradient."""

        def called(_parameter: Tensor) -> None:
            look()

        self._hooks += [
            self._parameters[key].register_post_accumulate_grad_hook(called) for key in keys
        ]

    def release(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


@final
@dataclass(kw_only=True)
class Flat:
    """A buffer for one bucket's gradients."""

    content: Tensor
    """(size,)"""
    views: list[Tensor]
    """Of `content`, one a parameter, of its shape and strides."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One parameter of a bucket."""

    index: int
    """Its place among the trained parameters."""
    parameter: nn.Parameter
    offset: int
    """Where it begins in the flat buffer, in elements."""


@final
class Bucket:
    """Parameters of one dtype and device whose gradients travel together.

    Buffers are pooled: one is taken for every shard's gradients, and is free again once they have
    been added to another's.
    """

    def __init__(self, chosen: Sequence[tuple[int, nn.Parameter]], slices: int, shards: int):
        self.members = list(_laid_out(chosen))
        self.places, self.parameters = zip(*chosen, strict=True)
        _, first = chosen[0]
        self.dtype, self.device = first.dtype, first.device
        self.step = slices * ALIGNMENT
        last = self.members[-1]
        self.size = rounded_up(last.offset + last.parameter.numel(), self.step)
        """Elements of a buffer: slices of equal length."""
        self.tree: TreeSum[Flat] = TreeSum(shards, self.add)
        self.missing = len(chosen)
        """Gradients of the open shard that haven't come."""
        self.is_ready = False
        """Whether the sums of this worker's shards are complete."""
        self._rooms: dict[int, Tensor] = {}
        self._free: list[Flat] = []
        self._every: list[Flat] = []
        self._strides = [torch.empty_like(p, device="meta").stride() for _, p in chosen]

    def take(self) -> Flat:
        """Take a buffer that is not in use."""
        # The pool grows only when all of it is in use. Views have the parameters' strides.
        if not self._free:
            self._hold(torch.zeros(self.size, dtype=self.dtype, device=self.device))
        return self._free.pop()

    def use(self, contents: Sequence[Tensor]) -> None:
        """Lend these buffers, (size,) zeros each, in this order, before any of its own."""
        for content in contents:
            self._hold(content)
        self.begin()

    def give(self, flat: Flat) -> None:
        """Take a buffer back."""
        self._free.append(flat)

    def add(self, left: Flat, right: Flat) -> Flat:
        """Add two sums, in place of the left one."""
        left.content.add_(right.content)
        self.give(right)
        return left

    def pack(self, gradients: list[Tensor] | None = None) -> Flat:
        """Move the gradients into a buffer; a parameter without one counts as zero.

        Args:
            gradients: The parameters', where it is known that each has one.
        """
        flat = self.take()
        views = flat.views
        if gradients is None:
            present = [(p.grad, view) for p, view in zip(self.parameters, views, strict=True)]
            flat.content.zero_()
            gradients = [gradient for gradient, _ in present if gradient is not None]
            views = [view for gradient, view in present if gradient is not None]
        if gradients:
            torch._foreach_copy_(views, gradients)
        # Taken out of `.grad`, so that autograd starts the next shard from nothing.
        set_gradients(self.parameters)
        self.missing = 0
        return flat

    def zeros(self) -> Flat:
        """Lend a buffer of (positive) zeros."""
        flat = self.take()
        flat.content.zero_()
        return flat

    def room(self, sizes: Sequence[int]) -> list[Tensor]:
        """Lend room of so many elements each until the next step."""
        return [self._room(place, size) for place, size in enumerate(sizes)]

    def show(self) -> None:
        """Make the sum of all shards the parameters' gradients."""
        set_gradients(self.parameters, self.tree.values[0].views)

    def begin(self) -> None:
        """Take all buffers back that the last step has used."""
        self.tree.clear()
        self._free = self._every[::-1]  # in the same order: each has the same use again
        self.is_ready = False

    def free(self) -> None:
        """Forget all buffers; the gradients that the parameters have stay theirs."""
        self.begin()
        self._free, self._every, self._rooms = [], [], {}

    @property
    def held_bytes(self) -> int:
        """Memory of all buffers."""
        every = [flat.content for flat in self._every] + list(self._rooms.values())
        return sum(tensor.nbytes for tensor in every)

    def _hold(self, content: Tensor) -> None:
        views = [
            content.as_strided(m.parameter.shape, strides, content.storage_offset() + m.offset)
            for m, strides in zip(self.members, self._strides, strict=True)
        ]
        made = Flat(content=content, views=views)
        self._every.append(made)
        self._free.append(made)

    def _room(self, place: int, size: int) -> Tensor:
        if size == self.size:
            return self.take().content
        if place not in self._rooms:
            self._rooms[place] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._rooms[place]


@final
@dataclass(kw_only=True)
class Layout:
    """Which parameters get gradients, and in which buckets."""

    bucket_bytes: int
    """Above this a bucket, which may be one large parameter, travels in several parts."""
    within_node: bool
    """Whether no network is between the workers."""

    buckets: list[Bucket] = field(default_factory=list)
    """In the order in which a backward pass completes them."""
    bucket_of: dict[int, Bucket] = field(default_factory=dict)
    """By the place of a parameter among the trained ones."""
    without: list[int] = field(default_factory=list)
    """Places of the trained parameters that get no gradient."""

    @property
    def is_freed(self) -> bool:
        """Whether there are no buffers, so that others may be made."""
        return not any(bucket.held_bytes for bucket in self.buckets)

    def free(self) -> None:
        """Forget all buffers; the gradients that the parameters have stay theirs."""
        for bucket in self.buckets:
            bucket.free()

    def most_at_once(self, bucket: Bucket) -> int:
        """Say how many elements of a bucket travel at once."""
        return rounded_up(self.bucket_bytes // bucket.dtype.itemsize, bucket.step)


def lay_out(
    parameters: Sequence[nn.Parameter],
    order: Sequence[int],
    most: int,
    slices: int,
    shards: int,
    *,
    least: int = 0,
    within_node: bool = True,
) -> Layout:
    """Put parameters into buckets.

    Args:
        parameters: All that are trained.
        order: The places of those that get a gradient, in the order in which they get it.
        most: Bytes of a bucket.
        slices: Into how many a bucket is cut: most often one for each worker.
        shards: How many there are.
        least: Bytes below which a bucket takes in more, however large.
        within_node: Whether no network is between the workers.
    """
    sizes = [parameters[place].nbytes for place in order]
    kinds = [f"{parameters[place].dtype} {parameters[place].device}" for place in order]
    without = sorted(set(range(len(parameters))).difference(order))
    layout = Layout(bucket_bytes=most, within_node=within_node, without=without)
    for group in cut(sizes, kinds, min(FIRST_BYTES, most), most, least):
        chosen = [(order[i], parameters[order[i]]) for i in group]
        bucket = Bucket(chosen, slices, shards)
        layout.buckets.append(bucket)
        layout.bucket_of |= dict.fromkeys([place for place, _ in chosen], bucket)
    return layout


def bucket_bytes(total: int, slices: int, peers: int, *, by_memory: bool) -> int:
    """Choose the size of a bucket.

    Args:
        total: Bytes of all gradients.
        slices: Into how many a bucket is cut.
        peers: How many exchange theirs with each other.
        by_memory: Whether a node's workers share it, or no network is in between at all.
    """
    parts = WITHIN_NODE if by_memory else BETWEEN_NODES
    least = MIN_BYTES_WITHIN_NODE if by_memory else 0
    return min(MAX_BYTES, max(slices * peers * SLICE_BYTES, total // parts, least))


def cut(
    sizes: Sequence[int], kinds: Sequence[str], first: int, most: int, least: int = 0
) -> list[list[int]]:
    """Group what comes in this order into buckets of one kind each.

    Args:
        sizes: In bytes.
        kinds: What can't be mixed in a bucket.
        first: Bytes at which the first bucket is full.
        most: Bytes at which any other is full; one item may be larger.
        least: Bytes below which none is.

    Returns:
        Positions, ascending in each bucket; the buckets in the order in which they are complete.
    """
    done: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for position, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        # Parameters of different kinds alternate, so one bucket of each kind is open at a time.
        limit = most if done else first
        if kind in filling and filled[kind] >= least and filled[kind] + size > limit:
            done.append(filling.pop(kind))
            filled[kind] = 0
        filling.setdefault(kind, []).append(position)
        filled[kind] = filled.get(kind, 0) + size
    done += filling.values()
    # A bucket is complete when its last gradient is.
    return sorted(done, key=lambda group: group[-1])


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor] | None:
    """Give what these parameters have in `.grad`; None if one has nothing."""
    gradients = list(map(_GRADIENT, parameters))
    return None if any(map(is_, gradients, repeat(None))) else gradients


def set_gradients(
    parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor | None] = repeat(None)
) -> None:
    """Put gradients, as many or by default none, in the place of what these parameters have."""
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = gradient


def are_trained(parameters: Iterable[nn.Parameter]) -> tuple[bool, ...]:
    """Say which of these are trained now."""
    return tuple(map(_IS_TRAINED, parameters))


def gradient_is_gone(name: str) -> UsageError:
    """Say that a parameter has no gradient any more that it had got."""
    return UsageError(
        f"the gradient of {name} is gone within the backward pass: a hook of the script's has "
        "dropped it before the workers' were combined. Do so behind s.backward(loss)"
    )


def rounded_up(number: int, multiple: int) -> int:
    """Round up to a multiple, at least one of it."""
    return max(1, math.ceil(number / multiple)) * multiple


def _laid_out(chosen: Sequence[tuple[int, nn.Parameter]]) -> Iterator[Member]:
    offset = 0
    for index, parameter in chosen:
        yield Member(index=index, parameter=parameter, offset=offset)
        # Some kernels add in another order where memory isn't aligned, and what comes before a
        # parameter in its bucket depends on the number of workers.
        offset += rounded_up(parameter.numel(), ALIGNMENT)
