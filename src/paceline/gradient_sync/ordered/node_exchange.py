"""Partial sums in memory that all workers of a node share. Bits are those of `exchange.py`.

A worker owns a slice of every buffer. It posts when a buffer is complete; when all have, the owner
of each slice adds the workers' sums along the tree, and writes the result to all of them, itself.
It posts that, and whoever has received it from all owners has the whole sum in its own buffer.
Nothing is copied in between, and no lock is held: a slice is its owner's from the first message to
the second, and the rest of the time its worker's.
"""

import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from paceline.distributed.node_memory import NodeMemory
from paceline.distributed.work_division import Division
from paceline.gradient_sync.buckets import Bucket, Layout, rounded_up
from paceline.gradient_sync.ordered.reduction_tree import Node, TreeSum, additions, roots

_READY, _SUMMED, _FINISHED, _FAILED = b"rsef"
_CHUNK_ELEMENTS = 1 << 15
"""Added at once by a thread: what has been added is still in its cache when it is copied."""
_PAGE_BYTES = 4096


class _Chunk(NamedTuple):
    """A part of the slice that this worker adds up of a bucket."""

    additions: list[tuple[Tensor, Tensor]]
    """The second is added to the first; in this order."""
    total: Tensor
    """What that comes to."""
    copies: list[Tensor]
    """Where it goes."""


@final
class NodeExchange:
    """Completes sums over all workers of a node, several at a time while the backward pass goes on.

    All workers start the same buckets in the same order.
    """

    def __init__(self, memory: NodeMemory, shards: int, *, divisor: int = 1) -> None:
        """Args:
        memory: Shared with the node's other workers, who are all there are.
        shards: How many shards a step has.
        divisor: What sums are divided by.
        """
        self._memory, self._divisor = memory, divisor
        division = Division.of(shards, memory.workers)
        runs = [division.parts_of(rank) for rank in range(memory.workers)]
        pools = [_pool(run, shards) for run in runs]
        self._buffers = max(count for count, _ in pools)
        """Of each bucket, on every worker."""
        self._held = [held for _, held in pools]
        """By worker: in which of them the sums of its subtrees are."""
        self._additions = additions([n for run in runs for n in roots(run, shards)], shards)
        self._sums: weakref.WeakKeyDictionary[Bucket, list[_Chunk]] = weakref.WeakKeyDictionary()
        self._waiting: deque[list[_Chunk]] = deque()
        """Started, and not yet summed here."""
        self._started = 0
        """Buckets of the step."""
        self._ready = [0] * memory.workers
        """By worker: buckets that it has started beyond those that are summed here."""
        self._done = [0] * memory.workers
        """By worker: buckets whose slice it has summed, of the step."""
        self._ends: list[deque[bool]] = [deque() for _ in range(memory.workers)]
        """By worker: whether something failed, of the step that it has finished."""

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
            bucket.use(list(buffers[self._memory.rank]))
            self._sums[bucket] = self._plan(buffers)
            begin = end

    def send(self, bucket: Bucket, _layout: Layout) -> None:
        """Let the others read a bucket's sums. Collective, but doesn't block."""
        self._waiting.append(self._sums[bucket])
        self._started += 1
        self._memory.post(bytes([_READY]))
        self.poll()

    def poll(self) -> None:
        """Add up what is there. Doesn't block."""
        if self._waiting:
            self._receive()

    def finish(self, failure: int) -> bool:
        """Wait until all sums are complete. Collective.

        Args:
            failure: Not 0 where something went wrong on this worker.

        Returns:
            Whether something went wrong on any worker.
        """
        rank = self._memory.rank
        self._memory.post(bytes([_FAILED if failure else _FINISHED]))
        self._ends[rank].append(bool(failure))
        while missing := self._missing():
            self._receive(missing)
        # Others may be a step ahead by now: what they have sent of it stays counted.
        self._done = [done - self._started for done in self._done]
        self._started = 0
        failures = [ends.popleft() for ends in self._ends]
        return any(failures)

    def wire_bytes(self, total: int) -> float:
        """Count what passes between this worker and the others for so many bytes of buffers."""
        workers = self._memory.workers
        return (len(self._held[self._memory.rank]) + 1) * (workers - 1) / workers * total

    def reset(self) -> None:
        """Let go of buckets that have no buffers any more. Local to the worker."""
        for bucket in [bucket for bucket in self._sums if not bucket.held_bytes]:
            del self._sums[bucket]

    def release(self) -> None:
        """Leave the others. Local to the worker."""
        self._sums.clear()
        self._memory.close()

    def _missing(self) -> list[int]:
        """List the workers that have more to send of this step."""
        return [
            rank
            for rank, (ends, done) in enumerate(zip(self._ends, self._done, strict=True))
            if not ends or done < self._started
        ]

    def _receive(self, waiting_for: Collection[int] = ()) -> None:
        for rank, messages in self._memory.receive(waiting_for):
            for message in messages:
                if message == _READY:
                    self._ready[rank] += 1
                elif message == _SUMMED:
                    self._done[rank] += 1
                else:
                    self._ends[rank].append(message == _FAILED)
        own = self._memory.rank
        self._ready[own] = len(self._waiting)
        while self._waiting and min(self._ready) > 0:
            self._ready = [ready - 1 for ready in self._ready]
            self._add_up(self._waiting.popleft())

    def _add_up(self, chunks: Sequence[_Chunk]) -> None:
        for chunk in chunks:
            for left, right in chunk.additions:
                left.add_(right)
            if self._divisor != 1:
                chunk.total.div_(self._divisor)
            for there in chunk.copies:
                there.copy_(chunk.total)
        self._done[self._memory.rank] += 1
        self._memory.post(bytes([_SUMMED]))

    def _plan(self, buffers: Sequence[Tensor]) -> list[_Chunk]:
        """Cut this worker's slice of a bucket into chunks.

        Args:
            buffers: By worker: (buffers, size).
        """
        length = buffers[0].shape[1] // self._memory.workers
        first, last = self._memory.rank * length, (self._memory.rank + 1) * length
        size, chunks = _CHUNK_ELEMENTS * torch.get_num_threads(), []
        for begin in range(first, last, size):
            end = min(begin + size, last)
            every = [
                [of_worker[place, begin:end] for place in held]
                for of_worker, held in zip(buffers, self._held, strict=True)
            ]
            rows = [row for of_worker in every for row in of_worker]
            pairs = [(rows[left], rows[right]) for left, right in self._additions]
            chunks.append(_Chunk(pairs, rows[0], [of_worker[0] for of_worker in every[1:]]))
        return chunks


def _pool(run: range, shards: int) -> tuple[int, list[int]]:
    """Say how a run of shards uses its buffers: how many, and in which ones its sums end."""
    free: list[int] = []
    made = 0

    def add(left: int, right: int) -> int:
        free.append(right)
        return left

    tree = TreeSum(shards, add)
    for shard in run:
        if not free:
            free.append(made)
            made += 1
        tree.push(Node(0, shard), free.pop())
    return made, tree.values
