"""Sums gradients of fixed shards in an order that doesn't depend on the number of workers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter, is_
from typing import final

import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.node_memory import connect_node
from paceline.distributed.work_division import Division
from paceline.errors import JobError, UsageError
from paceline.gradient_sync.buckets import (
    MIN_BYTES_WITHIN_NODE,
    Arrivals,
    Bucket,
    Flat,
    Layout,
    are_trained,
    bucket_bytes,
    gradient_is_gone,
    gradients_of,
    lay_out,
    set_gradients,
)
from paceline.gradient_sync.name_list import list_names
from paceline.gradient_sync.ordered.exchange import Exchange, connect_leaders
from paceline.gradient_sync.ordered.node_exchange import NodeExchange
from paceline.gradient_sync.ordered.reduction_tree import Node

_KEPT = 2
"""Layouts whose buffers are kept: two models that are trained by turns have one each."""
_LAYOUT = attrgetter("layout")
_NOBODY = -1
"""Instead of a shard: none of this worker's shards had a sample."""
_FIX = (
    "With --shards every shard of every step must give gradients to the same parameters: use each "
    "of them every time, or give those that are left out a share of zero: "
    "loss + 0 * parameter.sum()"
)


@final
class OrderedSum:
    """Sums the gradients of all shards along one tree.

    1. A worker runs its shards one after another. As a bucket's gradients come, they move into a
       flat buffer, and buffers are added along the tree of `reduction_tree.py` as early as it
       allows.
    2. During its last shard each bucket is sent as soon as it is complete (`exchange.py`).
    3. `finish` waits until every parameter's gradient is the sum over all shards, the same bits on
       any number of workers.

    A step is `begin_step`, then for each of `own_shards` in turn either `skip` or `open_shard`, the
    backward pass and `close_shard`; then `finish`. One object, since hooks of the backward pass
    need shard, layout and exchange at once, with nothing to look up in between.
    """

    def __init__(self, group: Group, shards: int, *, bucket_bytes: int | None = None) -> None:
        """Connect the workers. Collective.

        Args:
            group: The workers; at most as many as there are shards.
            shards: How many shards a step has.
            bucket_bytes: Gradients that travel together; by the size of the model where None.

        Raises:
            UsageError: The backend can't be used for it.
        """
        self.own_shards = Division.of(shards, group.world_size).parts_of(group.rank)
        """The shards of this worker."""
        self._group, self._shards, self._bucket_bytes = group, shards, bucket_bytes
        self._exchange = _connect(group, shards) if group.world_size > 1 else None
        self._given: Mapping[str, nn.Parameter] = {}
        """What `begin_step` was given last."""
        self._every: list[nn.Parameter] = []
        self._layouts: dict[tuple[bool, ...], Layout] = {}
        self._trained: tuple[bool, ...] = ()
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._layout: Layout | None = None
        self._next = self.own_shards.start
        """The shard that is to come, or that is open."""
        self._is_open = self._is_packing = self._in_step = False
        self._arrivals = Arrivals[int]({})
        """Places of the parameters that got a gradient since it was looked last."""
        self._arrived: dict[int, None] = {}
        """Places of the parameters that got a gradient in the open shard's last backward pass."""
        self._left = 0
        """Buckets that have left."""
        self._unused: tuple[str, ...] = ()
        self._failure = ""

    def begin_step(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Drop all gradients, and notice what has been frozen or thawed.

        Collective where what is trained has changed.

        Args:
            parameters: All of them by name, frozen ones too; the same on every worker. Not to be
                changed in place.
        """
        # Another model, or another set of trained parameters, needs other buckets.
        if parameters is not self._given:
            every = list(parameters.values())
            if len(every) != len(self._every) or not all(map(is_, every, self._every)):
                self._forget()
                self._every = every
            self._given = parameters
        now = are_trained(self._every)
        if now != self._trained or self._layout is None:
            self._take(now, parameters)
        # All gradients and buffers of the last step are free again.
        set_gradients(self._every)
        if self._layout is not None:
            for bucket in self._layout.buckets:
                bucket.begin()
        self._next, self._left = self.own_shards.start, 0
        self._is_open = self._is_packing = False
        self._arrivals.clear()
        self._in_step = True
        self._unused, self._failure = (), ""

    def open_shard(self, shard: int, *, last: bool = True) -> None:
        """Say to which shard the next backward pass belongs. Local to the worker.

        Args:
            shard: The next one of `own_shards`.
            last: Whether its gradients are complete with this backward pass; others of it come
                before and are added up by autograd.

        Raises:
            UsageError: A backward pass has come between two shards.
        """
        assert shard == self._next, (shard, self._next)
        self._check_nothing_came()
        # Further backward passes of the same shard (micro-batches) add to what is there.
        if not self._is_open:
            set_gradients(self._parameters)
        self._is_open, self._is_packing = True, last
        self._arrivals.clear()
        self._arrived.clear()
        if last and self._layout is not None:
            for bucket in self._layout.buckets:
                bucket.missing = len(bucket.members)

    def close_shard(self) -> None:
        """Take what the shard's last backward pass has left.

        Collective once a worker in the first step, and in the first one of a new set of trained
        parameters: all agree on which of them get a gradient.

        Raises:
            JobError: Not all shards give gradients to the same parameters.
        """
        assert self._is_packing
        self._take_arrivals()
        self._is_open = self._is_packing = False
        # The first shard of all shows which parameters get a gradient: only now are there buckets.
        if self._layout is None:
            self._agree(self._next)
        assert self._layout is not None
        # Gradients that are missing count as zero; whether that is an error all workers learn in
        # `finish`.
        self._note_failure(self._layout)
        for bucket in self._layout.buckets:
            if bucket.missing:
                here = [m.index for m in bucket.members if m.parameter.grad is not None]
                self._checked_gradients(here)
                self._pack(bucket)
        self._next += 1

    def skip(self, shard: int) -> None:
        """Count a shard without samples as zero. Local to the worker."""
        assert shard == self._next, (shard, self._next)
        self._arrivals.clear()  # of a pass that stood in for one with samples
        if self._layout is not None:
            self._push_zeros(self._layout, shard)
        self._next += 1

    def finish(self) -> tuple[str, ...]:
        """Make every parameter's gradient the sum over all shards. Collective.

        Returns:
            After the first step (and the first of a new set of trained parameters) the names of
            those that get no gradient in any shard, else nothing.

        Raises:
            JobError: Not all shards gave gradients to the same parameters. On every worker.
            UsageError: A backward pass has come behind the last shard.
        """
        assert self._next == self.own_shards.stop, (self._next, self.own_shards)
        self._check_nothing_came()
        # A worker without samples takes part in the agreement too: it is collective.
        if self._layout is None:
            self._agree(_NOBODY)
        self._in_step = False
        # Raised on all workers together: one that raised alone would leave the others waiting.
        failed = bool(self._failure)
        if self._exchange is not None:
            failed = self._exchange.finish(int(failed))
        if failed:
            texts = self._group.gather_texts(self._failure)
            raise JobError(next(text for text in texts if text))
        # Each parameter's `.grad` becomes a view of the summed buffer.
        if self._layout is not None:
            for bucket in self._layout.buckets:
                bucket.show()
        return self._unused

    def release(self) -> None:
        """Leave the parameters alone from now on; their gradients stay. Local to the worker."""
        self._forget()
        if self._exchange is not None:
            self._exchange.release()

    @property
    def wire_bytes(self) -> float:
        """What this worker sends in a step, in bytes; 0 before the first one."""
        if self._exchange is None or self._layout is None:
            return 0.0
        sizes = (bucket.size * bucket.dtype.itemsize for bucket in self._layout.buckets)
        return self._exchange.wire_bytes(sum(sizes))

    @property
    def held_bytes(self) -> int:
        """Memory of all buffers."""
        layouts = self._layouts.values()
        return sum(bucket.held_bytes for layout in layouts for bucket in layout.buckets)

    def _forget(self) -> None:
        self._arrivals.release()
        for layout in self._layouts.values():
            layout.free()
        self._given, self._every, self._layouts, self._layout = {}, [], {}, None
        if self._exchange is not None:
            self._exchange.reset()

    def _take(self, trained: tuple[bool, ...], parameters: Mapping[str, nn.Parameter]) -> None:
        """Turn to another set of trained parameters."""
        self._trained = trained
        chosen = {p: n for n, p in parameters.items() if p.requires_grad}  # a shared one once
        self._parameters, self._names = list(chosen), list(chosen.values())
        # Hooks only on what is trained now.
        self._arrivals.release()
        self._arrivals = Arrivals(dict(enumerate(self._parameters)))
        # Least recently used: what was used last is at the end, and older layouts lose their
        # buffers.
        self._layout = self._layouts.pop(trained, None)
        if self._layout is not None:
            self._layouts[trained] = self._layout  # the last one used
            self._look_within_passes(self._layout)
            if self._exchange is not None and self._layout.is_freed:
                self._exchange.prepare(self._layout)
        for layout in list(self._layouts.values())[:-_KEPT]:
            layout.free()
            if self._exchange is not None:
                self._exchange.reset()

    def _look_within_passes(self, layout: Layout) -> None:
        """Send buckets during backward passes: look after the last gradient of each.

        Over a network after every one: what has come from others may have a next stage.
        """
        exchange = self._exchange
        is_near = exchange is None or (isinstance(exchange, NodeExchange) and exchange.within_node)
        ends = [bucket.members[-1].index for bucket in layout.buckets]
        self._arrivals.look(self._look, ends if is_near else range(len(self._parameters)))

    @torch.no_grad()
    def _look(self) -> None:
        if not self._is_packing:
            self._check_nothing_came()
            if not self._in_step:
                self._arrivals.clear()
            return
        self._take_arrivals()
        if self._exchange is not None:
            self._exchange.poll()

    def _check_nothing_came(self) -> None:
        """Refuse gradients between shards, that would belong to none."""
        is_between = self._in_step and not self._is_open and self._next > self.own_shards.start
        if is_between and self._arrivals:
            raise _twice()

    def _take_arrivals(self) -> None:
        """Take the gradients that have come; pack and send what they complete."""
        places, before = self._arrivals.take(), len(self._arrived)
        if not places:
            return
        self._arrived.update(dict.fromkeys(places))
        if len(self._arrived) < before + len(places):
            raise _twice()
        if self._layout is None:
            self._checked_gradients(places)
            return
        # A bucket is packed with its last gradient, and leaves if this is the last shard.
        for bucket, number in Counter(map(self._layout.bucket_of.get, places)).items():
            if bucket is None:
                continue
            bucket.missing -= number
            if bucket.missing == 0:
                self._pack(bucket, self._checked_gradients(bucket.places))

    def _checked_gradients(self, places: Sequence[int]) -> list[Tensor]:
        """Give gradients that have come; refuse those that are gone, or sparse."""
        gradients = gradients_of(map(self._parameters.__getitem__, places))
        if gradients is None:
            gone = next(place for place in places if self._parameters[place].grad is None)
            raise gradient_is_gone(self._names[gone])
        if not set(map(_LAYOUT, gradients)) <= {torch.strided}:
            sparse = next(
                place
                for place, gradient in zip(places, gradients, strict=True)
                if gradient.layout is not torch.strided
            )
            raise JobError(
                f"{self._names[sparse]} has a sparse gradient, which --shards can't sum: make "
                "the layer with sparse=False"
            )
        return gradients

    def _pack(self, bucket: Bucket, gradients: list[Tensor] | None = None) -> None:
        self._push(bucket, self._next, bucket.pack(gradients))

    def _push_zeros(self, layout: Layout, shard: int) -> None:
        for bucket in layout.buckets:
            bucket.missing = 0
            self._push(bucket, shard, bucket.zeros())

    def _push(self, bucket: Bucket, shard: int, flat: Flat) -> None:
        # A shard is a leaf; the tree adds what it can, and the last shard makes the bucket's sums
        # final.
        bucket.tree.push(Node(0, shard), flat)
        if shard + 1 == self.own_shards.stop:
            bucket.is_ready = True
            self._send_what_is_ready()

    def _send_what_is_ready(self) -> None:
        """Send complete buckets, in the same order on every worker."""
        assert self._layout is not None
        if self._exchange is None:
            return
        # A bucket that is complete early waits for those before it.
        for bucket in self._layout.buckets[self._left :]:
            if not bucket.is_ready:
                break
            self._exchange.send(bucket, self._layout)
            self._left += 1

    def _note_failure(self, layout: Layout) -> None:
        """See whether a shard gave gradients to just those parameters that the first one did."""
        lost = [
            member.index
            for bucket in layout.buckets
            if bucket.missing
            for member in bucket.members
            if member.parameter.grad is None
        ]
        gained = [place for place in layout.without if self._parameters[place].grad is not None]
        set_gradients([self._parameters[place] for place in gained])
        if (lost or gained) and not self._failure:
            here = _place(self._next, self._group.rank)
            lost_names, gained_names = (
                [self._names[i] for i in sorted(set_)] for set_ in (lost, gained)
            )
            self._failure = _differing(lost_names, gained_names, here, "before")

    def _agree(self, shard: int) -> None:
        """Agree on which parameters get a gradient, and when. Collective.

        Each worker tells the order in which its first shard's gradients came.

        Raises:
            JobError: The shards differ in which do. On every worker.
        """
        # A row: the shard, the position at which each gradient came (-1: none), whether on one
        # node.
        own = torch.full((2 + len(self._parameters),), -1, dtype=torch.int64)
        own[0], own[-1] = shard, self._group.placement.on_one_node
        if shard != _NOBODY:
            # Parameters that only an earlier micro-batch reached come last.
            late = [i for i, p in enumerate(self._parameters) if p.grad is not None]
            for position, place in enumerate(dict.fromkeys((*self._arrived, *late))):
                own[1 + place] = position
        # All workers build the buckets from the same rows, hence alike.
        rows = self._group.gather_rows(own)
        order = _order_of(rows[:, :-1], self._names)
        if order is None:
            return  # the global batch is empty
        layout = self._lay_out(order, within_node=bool(rows[0, -1]))
        self._layout = self._layouts[self._trained] = layout
        self._look_within_passes(layout)
        if self._exchange is not None:
            self._exchange.prepare(layout)
        self._unused = tuple([self._names[place] for place in layout.without])
        # Shards that were skipped before there were buckets count as zero.
        for skipped in range(self.own_shards.start, self._next):
            self._push_zeros(layout, skipped)
        for bucket in layout.buckets:
            bucket.missing = len(bucket.members)

    def _lay_out(self, order: Sequence[int], *, within_node: bool) -> Layout:
        total = sum(self._parameters[place].nbytes for place in order)
        exchange = self._exchange
        slices, peers = (1, 1) if exchange is None else (exchange.slices, exchange.peers)
        by_memory = within_node or isinstance(exchange, NodeExchange)
        most = self._bucket_bytes or bucket_bytes(total, slices, peers, by_memory=by_memory)
        least = MIN_BYTES_WITHIN_NODE if by_memory and exchange is not None else 0
        return lay_out(
            self._parameters,
            order,
            most,
            slices,
            self._shards,
            least=min(least, most),
            within_node=within_node,
        )


def _connect(group: Group, shards: int) -> Exchange | NodeExchange:
    """Connect the workers, those of a node by its memory. Collective."""
    memory = connect_node(group, several=True)
    if memory is None:
        return Exchange(group, shards)
    leaders = connect_leaders(group, memory.nodes) if len(memory.nodes) > 1 else None
    across = None if leaders is None else Exchange(group, shards, leaders)
    return NodeExchange(memory, shards, across)


def _order_of(rows: Tensor, names: Sequence[str]) -> list[int] | None:
    """Read what the workers tell.

    Args:
        rows: (workers, 1 + parameters) int64: a shard or `_NOBODY`, and when each of its gradients
            came (0 for the first), -1 for one that didn't.
        names: Of the parameters.

    Returns:
        Places of the parameters that get a gradient, in the order of the first worker that has
        samples; None where no worker has.

    Raises:
        JobError: The shards differ in which do.
    """
    reported = [(rank, *row) for rank, row in enumerate(rows.tolist()) if row[0] != _NOBODY]
    if not reported:
        return None
    # Every worker with samples must name the same parameters as the first one.
    first_rank, first_shard, *first = reported[0]
    for rank, shard, *positions in reported[1:]:
        pairs = list(zip(names, positions, first, strict=True))
        lost = [name for name, here, there in pairs if here < 0 <= there]
        gained = [name for name, here, there in pairs if there < 0 <= here]
        if lost or gained:
            raise JobError(
                _differing(
                    lost, gained, _place(shard, rank), f"in {_place(first_shard, first_rank)}"
                )
            )
    came = [place for place, position in enumerate(first) if position >= 0]
    return sorted(came, key=lambda place: first[place])


def _differing(lost: Sequence[str], gained: Sequence[str], here: str, there: str) -> str:
    said = []
    if lost:
        said.append(f"{list_names(lost)} got no gradient in {here}, but did {there}")
    if gained:
        said.append(f"{list_names(gained)} got a gradient in {here}, but none {there}")
    return f"{'; '.join(said)}. {_FIX}"


def _place(shard: int, rank: int) -> str:
    return f"shard {shard} on rank {rank}"


def _twice() -> UsageError:
    return UsageError(
        "with --shards a step has one backward pass a shard: add the losses up before it"
    )
