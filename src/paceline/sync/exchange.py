"""Carries partial sums between the workers. The backends move bytes and add nothing.

Stage 1: every worker sends the sums of its subtrees, each worker a slice of its own (all-to-all).
The worker that owns a slice adds them along the tree. Stage 2: all collect the slices (all-gather).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.dist.division import Division
from paceline.dist.group import Group
from paceline.errors import UsageError
from paceline.sync.tree import additions, roots


@dataclass(kw_only=True)
class _Travel:
    """A buffer on its way."""

    work: dist.Work
    received: Tensor
    """(all subtrees, slice)"""
    total: Tensor
    """(workers * slice,): where the sum of all shards will be."""


@final
class Exchange:
    """Completes sums over all workers, several at a time while the backward pass goes on.

    All workers start the same buffers in the same order. On the CPU the second stage runs in a
    process group of its own: when it can begin differs between workers, and collectives of one
    group must begin in one order.
    """

    def __init__(self, group: Group, shards: int) -> None:
        """Connect the workers. Collective.

        Raises:
            UsageError: The backend has no all-to-all.
        """
        division = Division.of(shards, group.world_size)
        held = [roots(division.parts_of(rank), shards) for rank in range(group.world_size)]
        self._counts = [len(nodes) for nodes in held]
        self._own = self._counts[group.rank]
        self._is_even = self._counts == [1] * group.world_size
        """As with powers of two: the sums are sent from where they are."""
        self._additions = additions([node for nodes in held for node in nodes], shards)
        self._workers = group.world_size
        self._failures = torch.zeros(2, group.world_size, dtype=torch.int64)
        self._first: deque[_Travel] = deque()
        self._second: list[_Travel] = []
        self._spreading: dist.ProcessGroup | None = None
        self._stream: torch.Stream | None = None
        if group.has_few_operations:
            raise UsageError(
                f"--shards needs all-to-all, which --backend {group.backend} doesn't have. Use "
                "--backend nccl or gloo"
            )
        if group.device.type == "cpu":
            self._spreading = another_group()
        else:
            self._stream = torch.Stream(device=group.device)

    def wire_bytes(self, total: int) -> float:
        """Count what this worker sends for buffers of so many bytes in all."""
        return (self._own + 1) * (self._workers - 1) / self._workers * total

    def room(self, size: int) -> list[int]:
        """Say how many elements of room `start` needs for buffers of so many elements."""
        slices = size // self._workers
        if self._is_even:
            return [size]
        return [sum(self._counts) * slices, self._own * size]

    def start(self, sums: Sequence[Tensor], room: Sequence[Tensor], most: int) -> None:
        """Send this worker's sums on their way. Collective, but doesn't block.

        Args:
            sums: Of its subtrees, each (workers * slice,); the first one becomes the sum of all.
            room: To work in, of the sizes that `room` says; neither may be touched or let go of
                before `finish`.
            most: Elements that travel at once, a multiple of the workers.
        """
        size = len(sums[0])
        for begin in range(0, size, most):
            end = min(begin + most, size)
            parts = [r[len(r) * begin // size : len(r) * end // size] for r in room]
            self._start([s[begin:end] for s in sums], parts)

    def poll(self) -> None:
        """Go on with what has arrived. Doesn't block."""
        while self._first and self._first[0].work.is_completed():
            self._add_and_spread(self._first.popleft())

    def finish(self, failure: int) -> bool:
        """Wait until all sums are complete. Collective.

        Args:
            failure: Not 0 where something went wrong on this worker.

        Returns:
            Whether something went wrong on any worker.
        """
        told, heard = self._failures
        told.fill_(failure)
        telling = _started(dist.all_to_all_single(heard, told, async_op=True))
        while self._first:
            self._add_and_spread(self._first.popleft())
        telling.wait()
        for travel in self._second:
            travel.work.wait()
        self._second.clear()
        return bool(heard.any())

    def release(self) -> None:
        """Leave the second process group. Local to the worker."""
        if self._spreading is not None and dist.is_initialized():
            dist.destroy_process_group(self._spreading)
        self._spreading = None

    def _start(self, sums: Sequence[Tensor], room: Sequence[Tensor]) -> None:
        rows = room[0].view(sum(self._counts), -1)
        work = self._scatter(sums, rows, room[-1])
        travel = _Travel(work=work, received=rows, total=sums[0])
        if self._stream is None:
            self._first.append(travel)
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            self._add_and_spread(travel)

    def _scatter(self, sums: Sequence[Tensor], rows: Tensor, room: Tensor) -> dist.Work:
        if self._is_even:
            return _started(dist.all_to_all_single(rows.view(-1), sums[0], async_op=True))
        size = rows.shape[1]
        sent = room.view(self._workers, self._own, size)
        torch.stack([s.view(self._workers, size) for s in sums], 1, out=sent)
        taken, given = [count * size for count in self._counts], [self._own * size] * self._workers
        return _started(dist.all_to_all_single(rows.view(-1), room, taken, given, async_op=True))

    def _add_and_spread(self, travel: _Travel) -> None:
        travel.work.wait()
        rows = travel.received
        for left, right in self._additions:
            rows[left].add_(rows[right])
        travel.work = _started(
            dist.all_gather_into_tensor(travel.total, rows[0], group=self._spreading, async_op=True)
        )
        self._second.append(travel)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # it is asynchronous
    return work


def another_group(*, of_device: bool = False) -> dist.ProcessGroup:
    """Connect the workers once more, with the timeout of their first group. Collective.

    Args:
        of_device: By the backends of that group, which carry tensors of its device too; otherwise
            by Gloo alone.
    """
    world = dist.group.WORLD
    assert world is not None
    timeout: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    group = dist.new_group(backend=None if of_device else "gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)  # this worker is in it
    return group
