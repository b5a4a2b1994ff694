"""Ordered sums in shared memory of a node's workers; the same bits as those of `exchange.py`.

Each worker owns a slice of every buffer, and adds it up for all workers of its node. Over several
nodes the owners of a slice, one a node, exchange their nodes' sums first (`exchange.py`).
"""

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from math import inf
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.distributed.node_memory import NodeMemory
from paceline.distributed.work_division import Division
from paceline.errors import InfrastructureError
from paceline.gradient_sync.buckets import Bucket, Layout, rounded_up
from paceline.gradient_sync.ordered.exchange import Exchange, Piece
from paceline.gradient_sync.ordered.reduction_tree import Node, TreeSum, additions, roots

_READY, _FINISHED, _FAILED, _ALL_FINISHED, _SOME_FAILED, _LOST = b"refEFl"
_ONE_READY = bytes([_READY])
_CHUNK_ELEMENTS = 1 << 17
"""Added at once by a thread: what has been added is still in its cache when it is copied."""
_PAGE_BYTES = 4096
_LOOK_S = 0.001
"""After which who waits for this node looks for what has come from others."""
_PATIENCE_S = 0.05
"""After which who waits for another node looks for what has come from this one."""


class _Chunk(NamedTuple):
    """A part of the slice that this worker adds up of a bucket."""

    additions: list[tuple[Tensor, Tensor]]
    """Pairs of terms, in order: the second is added to the first, in place."""
    total: Tensor
    """The sum, after all additions."""
    copies: list[Tensor]
    """The workers' buffers that the sum is copied to."""


class _Slice(NamedTuple):
    """What this worker adds up of a bucket."""

    chunks: list[_Chunk]
    sums: list[Tensor]
    """The sums of this node's subtrees; the first becomes the sum of all."""
    room: list[Tensor]
    """Buffers for the exchange with other nodes."""
    most: int
    """Elements that are sent at once, at most."""


@final
class NodeExchange:
    """Completes sums over all workers, several at a time while the backward pass goes on.

    All workers start the same buckets in the same order. Phases of a bucket:
    1. Each worker of the node sends the message "ready" once its buffer is complete.
    2. When all have, the owner of each slice adds the workers' sums along the tree.
    3. Over several nodes, the owners of a slice exchange their nodes' sums, and add them.
    4. The owner writes the result to all workers' buffers. Once it has done so for all buckets of
       the step it sends "finished", over several nodes "all finished" instead. A worker that has
       received this from all owners has the whole sums in its own buffers.
    No lock is held: a slice is its owner's from "ready" to "finished", else its worker's.

    One object, since a message from any worker may complete a slice of any bucket under way.
    """

    def __init__(
        self, memory: NodeMemory, shards: int, across: Exchange | None = None, *, divisor: int = 1
    ) -> None:
        """Create the node exchange.

        Args:
            memory: Shared with the node's other workers.
            shards: How many shards a step has.
            across: With the owners of this worker's slices on other nodes; None where there are
                none, or this worker owns nothing.
            divisor: What sums are divided by.
        """
        self._memory, self._across, self._divisor = memory, across, divisor
        # The same bits for a power of two, and quicker.
        self._factor = 1 / divisor if divisor.bit_count() == 1 < divisor else None
        self.rank, ranks = memory.rank, memory.ranks
        self.workers = memory.nodes[-1].stop
        """Number of workers on all nodes."""
        self.within_node = len(memory.nodes) == 1
        """Whether no network is between the workers."""
        self._owners = ranks[: min(map(len, memory.nodes))]
        """Ranks that own a slice, as many on every node."""
        self.slices = len(self._owners) * len(memory.nodes)
        """Number of equal slices that buckets have to be cut into."""
        self.peers = len(ranks) if self.within_node else len(memory.nodes)
        """Number of workers (or nodes) that exchange sums with each other."""
        division = Division.of(shards, self.workers)
        runs = [division.parts_of(rank) for rank in ranks]
        most, _ = zip(
            *(_pool(division.parts_of(r), shards) for r in range(self.workers)), strict=True
        )
        self._buffers = max(most)
        """Number of buffers of each bucket, the same on every worker."""
        self._held = [_pool(run, shards)[1] for run in runs]
        """By worker of this node: the buffers that hold the sums of its subtrees."""
        self._additions, self._left = additions(
            [n for run in runs for n in roots(run, shards)], shards
        )
        # What is under way in a step: buckets in the order in which they were started.
        self._sums: weakref.WeakKeyDictionary[Bucket, _Slice] = weakref.WeakKeyDictionary()
        self._waiting: deque[_Slice] = deque()
        """Slices of started buckets, not yet summed here."""
        self._travelling: deque[tuple[_Slice, Sequence[Piece]]] = deque()
        """Slices summed here that are being exchanged with other nodes."""
        self._ready = dict.fromkeys(ranks, 0)
        """By rank: buckets that it has started beyond those that are summed here."""
        self._ends: dict[int, deque[bool]] = {rank: deque() for rank in ranks}
        """By rank: whether something failed, of the step that it has finished."""
        self._outcomes: dict[int, deque[bool]] = {rank: deque() for rank in ranks}
        """By owner: whether something failed on any node, of the step that all have finished."""

    def prepare(self, layout: Layout) -> None:
        """Put a new layout's buckets into shared memory. Collective.

        Raises:
            InfrastructureError: There isn't enough of it, or a worker has ended.
        """
        sizes = [rounded_up(bucket.size * bucket.dtype.itemsize, 64) for bucket in layout.buckets]
        if not sizes:
            return
        total = rounded_up(self._buffers * sum(sizes), _PAGE_BYTES)
        blocks, begin = self._memory.share(total), 0
        for bucket, size in zip(layout.buckets, sizes, strict=True):
            end = begin + self._buffers * size
            # By worker: (buffers, size)
            buffers = [
                block[begin:end].view(self._buffers, size).view(bucket.dtype)[:, : bucket.size]
                for block in blocks
            ]
            bucket.use(list(buffers[self.rank - self._memory.ranks.start]))
            self._sums[bucket] = self._plan(bucket, buffers, layout.most_at_once(bucket))
            begin = end
        if self._across is not None:
            self._across.prepare(layout)

    def send(self, bucket: Bucket, _layout: Layout) -> None:
        """Announce that a bucket's sums can be read. Collective, but doesn't block."""
        self._waiting.append(self._sums[bucket])
        self._ready[self.rank] += 1
        self._memory.post(_ONE_READY)

    def poll(self) -> None:
        """Add up what is there. Doesn't block."""
        if self._across is not None and (self._waiting or self._travelling):
            with self._reports_lost_link():
                self._receive()
                self._publish(within_s=0)
        elif self._waiting:
            self._receive()

    def finish(self, failure: int) -> bool:
        """Wait until all sums are complete. Collective.

        Args:
            failure: Not 0 where something went wrong on this worker.

        Returns:
            Whether something went wrong on any worker.
        """
        # Complete this worker's slices; over several nodes all of them say first how it went.
        while self._waiting and self.within_node:
            self._receive([rank for rank, ready in self._ready.items() if not ready])
        self._memory.post(bytes([_FAILED if failure else _FINISHED]))
        self._ends[self.rank].append(bool(failure))
        if self._across is not None:
            with self._reports_lost_link():
                self._finish_across(self._across)
        # Until those of the node's other workers are complete.
        while missing := self._missing():
            self._receive(missing)
        failures = [ends.popleft() for ends in self._ends.values()]
        if not self.within_node:
            failures = [self._outcomes[rank].popleft() for rank in self._owners]
        return any(failures)

    def _finish_across(self, across: Exchange) -> None:
        """Complete this worker's slices, and learn how the step was on all nodes. Collective."""
        self._receive()  # who is alone on its node has nobody to wait for
        while silent := [rank for rank, ends in self._ends.items() if not ends]:
            self._receive(silent, _LOOK_S if self._travelling else inf)
            self._publish(within_s=0)
        across.report(int(any(ends[0] for ends in self._ends.values())))
        while self._travelling:
            self._receive(self._missing(), at_most_s=0)  # an error where one of them has ended
            self._publish(within_s=_PATIENCE_S)
        while not across.have_reported(_PATIENCE_S):
            self._receive(self._missing(), at_most_s=0)
        failed = across.end()
        self._outcomes[self.rank].append(failed)
        self._memory.post(bytes([_SOME_FAILED if failed else _ALL_FINISHED]))

    @contextmanager
    def _reports_lost_link(self) -> Iterator[None]:
        """Report a lost connection to another node to this node's workers.

        Raises:
            InfrastructureError: It is.
        """
        try:
            yield
        except InfrastructureError:
            raise  # of this node
        except RuntimeError as error:  # Gloo's
            with suppress(InfrastructureError):
                self._memory.post(bytes([_LOST]))
            raise self._lost(self.rank, str(error)) from error

    def _lost(self, rank: int, why: str) -> InfrastructureError:
        place = rank - self._memory.ranks.start
        others = [ranks[place] for ranks in self._memory.nodes if rank not in ranks]
        listed = " or ".join(map(str, others))
        return InfrastructureError(f"rank {rank} has lost rank {listed} on another node: {why}")

    def wire_bytes(self, total: int) -> float:
        """Count what passes between this worker and the others for so many bytes of buffers."""
        ranks, owners = self._memory.ranks, len(self._owners)
        held, owns = len(self._held[self.rank - ranks.start]), self.rank in self._owners
        # Its sums to the owners of slices; results, of its own slice, to all workers of the node.
        within = held * (owners - owns) + owns * (len(ranks) - 1)
        between = 0 if self._across is None else self._across.wire_bytes(total / owners)
        return within * total / owners + between

    def reset(self) -> None:
        """Release buckets that have no buffers any more. Local to the worker."""
        if self._across is not None:
            self._across.reset()
        for bucket in [bucket for bucket in self._sums if not bucket.held_bytes]:
            del self._sums[bucket]

    def release(self) -> None:
        """Leave the others. Local to the worker."""
        self._memory.close()
        if self._across is not None:
            self._across.release()
        self._travelling.clear()
        self._sums.clear()  # last: until here other threads may use what is in them

    def _missing(self) -> list[int]:
        """List the workers of this node that have more to send of this step."""
        missing = [rank for rank, ends in self._ends.items() if not ends]
        if not self.within_node:
            missing += [rank for rank in self._owners if not self._outcomes[rank]]
        return missing

    def _receive(self, waiting_for: Collection[int] = (), at_most_s: float = inf) -> None:
        for rank, messages in self._memory.receive(waiting_for, at_most_s):
            for message in messages:
                if message == _READY:
                    self._ready[rank] += 1
                elif message in (_FINISHED, _FAILED):
                    self._ends[rank].append(message == _FAILED)
                elif message == _LOST:
                    raise self._lost(rank, "connection closed by peer")
                else:
                    self._outcomes[rank].append(message == _SOME_FAILED)
        # Add up each bucket that all workers of the node have started.
        while self._waiting and min(self._ready.values()) > 0:
            self._ready = {rank: ready - 1 for rank, ready in self._ready.items()}
            self._add_up(self._waiting.popleft())

    def _add_up(self, own: _Slice) -> None:
        """Take a slice through phase 2, and begin phase 3 or end with 4."""
        for chunk in own.chunks:
            for left, right in chunk.additions:
                left.add_(right)
            if self.within_node:
                self._write(chunk)
        if self._across is not None:
            self._travelling.append((own, self._across.start(own.sums, own.room, own.most)))

    def _publish(self, within_s: float) -> None:
        """Write what has come back from the other nodes to this one's workers.

        Args:
            within_s: For how long to wait for more of the first that hasn't.
        """
        while self._travelling and self._across is not None:
            own, pieces = self._travelling[0]
            if not self._across.has_come(pieces, within_s):
                return
            self._travelling.popleft()
            for chunk in own.chunks:
                self._write(chunk)

    def _write(self, chunk: _Chunk) -> None:
        if self._factor is not None:
            chunk.total.mul_(self._factor)
        elif self._divisor != 1:
            chunk.total.div_(self._divisor)
        for there in chunk.copies:
            there.copy_(chunk.total)

    def _plan(self, bucket: Bucket, buffers: Sequence[Tensor], most: int) -> _Slice:
        """Cut this worker's slice of a bucket into chunks.

        Args:
            bucket: What for.
            buffers: By worker of this node: (buffers, size).
            most: Elements of the bucket that travel at once.
        """
        if self.rank not in self._owners:
            return _Slice([], [], [], 0)
        length = bucket.size // len(self._owners)
        first = self._owners.index(self.rank) * length
        last = first + length
        size, chunks = _CHUNK_ELEMENTS * torch.get_num_threads(), []
        for begin in range(first, last, size):
            rows = self._rows(buffers, begin, min(begin + size, last))
            pairs = [(rows[left], rows[right]) for left, right in self._additions]
            # Every worker's gradients are where its first subtree's sum was.
            begins = accumulate([len(held) for held in self._held[:-1]])
            chunks.append(_Chunk(pairs, rows[0], [rows[place] for place in begins]))
        rows = self._rows(buffers, first, last)
        sizes = [] if self._across is None else self._across.room(length)
        room = [torch.empty(size, dtype=bucket.dtype) for size in sizes]
        return _Slice(
            chunks, [rows[place] for place in self._left], room, most // len(self._owners)
        )

    def _rows(self, buffers: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
        """Give these elements of the sums of all subtrees of this node."""
        return [
            of_worker[place, begin:end]
            for of_worker, held in zip(buffers, self._held, strict=True)
            for place in held
        ]


def _pool(run: range, shards: int) -> tuple[int, list[int]]:
    """Say how a run of shards uses its buffers: how many, and in which ones its sums end."""
    free: list[int] = []
    made = 0

    def add(left: int, right: int) -> int:
        """Note that the right term's buffer is free: the sum is in the left one's."""
        free.append(right)
        return left

    tree = TreeSum(shards, add)
    for shard in run:
        if not free:
            free.append(made)
            made += 1
        tree.push(Node(0, shard), free.pop())
    return made, tree.values
