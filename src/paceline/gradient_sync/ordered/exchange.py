"""Exchanges partial sums between workers; backends only move bytes, additions are done here.

Stage 1: every worker sends the sums of its subtrees, each worker a slice of its own (all-to-all).
The worker that owns a slice adds them along the tree. Stage 2: all collect the slices (all-gather).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.device import is_accelerator
from paceline.distributed.group import Group, group_timeout
from paceline.distributed.work_division import Division
from paceline.errors import UsageError
from paceline.gradient_sync.buckets import ALIGNMENT, Bucket, Layout, rounded_up
from paceline.gradient_sync.ordered.chunk_tuner import CUTS, ChunkTuner, Cut
from paceline.gradient_sync.ordered.reduction_tree import additions, roots

MIN_BYTES = 8 << 10
"""What one worker sends another at once, at least: smaller messages gain nothing anywhere."""


@dataclass(kw_only=True)
class _Part:
    """Buffers of one all-to-all (stage 1)."""

    sums: list[Tensor]
    """Of this worker's subtrees, each (workers * slice,)."""
    room: Tensor
    """(workers * subtrees * slice,): where they lie by receiver, if there are several."""
    received: Tensor
    """(all subtrees * slice,)"""
    additions: list[tuple[Tensor, Tensor, Tensor]]
    """Two to add, and where their sum goes; in this order."""
    work: dist.Work | None = None


@dataclass(kw_only=True)
class Piece:
    """Buffers of one all-gather (stage 2). Made once, used in every step."""

    parts: list[_Part]
    own: Tensor
    """(parts, slice), or (slice,) for one part: where this worker's sums come."""
    spread: Tensor | list[Tensor]
    """Where all workers' come: one tensor for all, (workers * slice,), or with several parts one
    for each worker, (parts, slice), not contiguous."""
    work: dist.Work | None = None


@dataclass(frozen=True, kw_only=True)
class Leaders:
    """Workers of several nodes, one of each, who exchange what their nodes have added up."""

    nodes: Sequence[range]
    """Ranks of each node's workers."""
    first: dist.ProcessGroup
    second: dist.ProcessGroup


def connect_leaders(group: Group, nodes: Sequence[range]) -> Leaders | None:
    """Connect workers that have the same place on their nodes. Collective.

    Returns:
        None on a worker whose place isn't there on every node.
    """
    leaders = None
    for ranks in zip(*nodes, strict=False):  # as many as the node with the fewest workers has
        first, second = [
            dist.new_group(ranks, backend="gloo", timeout=group_timeout()) for _ in range(2)
        ]
        if group.rank in ranks:
            assert isinstance(first, dist.ProcessGroup)
            assert isinstance(second, dist.ProcessGroup)
            leaders = Leaders(nodes=nodes, first=first, second=second)
    return leaders


@final
class Exchange:
    """Completes sums over all workers, several at a time while the backward pass goes on.

    All workers start the same buffers in the same order. On the CPU the second stage runs in a
    process group of its own: when it can begin differs between workers, and collectives of one
    group must begin in one order. One object, since the collectives under way share buffers,
    counts and groups, which are made once and not in each step.
    """

    def __init__(self, group: Group, shards: int, leaders: Leaders | None = None) -> None:
        """Connect the workers. Collective.

        Args:
            group: All workers.
            shards: How many shards a step has.
            leaders: Those that exchange; by default each worker for itself.

        Raises:
            UsageError: The backend has no all-to-all.
        """
        # Which subtrees each worker (or node) holds, and in which order their sums are added.
        division = Division.of(shards, group.world_size)
        teams = [range(rank, rank + 1) for rank in range(group.world_size)]
        teams = teams if leaders is None else list(leaders.nodes)
        held = [roots(division.parts_of_all(team), shards) for team in teams]
        self._counts = [len(nodes) for nodes in held]
        own = next(place for place, team in enumerate(teams) if group.rank in team)
        self._own = self._counts[own]
        self._is_even = self._counts == [1] * len(teams)
        """As with powers of two: the sums are sent from where they are."""
        self._additions, _ = additions([node for nodes in held for node in nodes], shards)
        self._workers = len(teams)
        self._reports = torch.zeros(2, self._workers, 1 + len(CUTS), dtype=torch.int64)
        """By worker: whether something failed, and the time of each cut."""
        self._pieces: dict[tuple[int, ...], list[Piece]] = {}
        """By the buffers and the cut."""
        self._first: deque[Piece] = deque()
        self._second: list[Piece] = []
        self._grain: ChunkTuner | None = None
        self._scattering = None if leaders is None else leaders.first
        self._spreading = None if leaders is None else leaders.second
        self._report: dist.Work | None = None
        self._stream: torch.Stream | None = None
        if group.has_few_operations:
            raise UsageError(
                f"--shards needs all-to-all, which --backend {group.backend} doesn't have. Use "
                "--backend nccl or gloo"
            )
        if leaders is None and not is_accelerator(group.device):
            self._spreading = another_group()
        elif leaders is None:
            self._stream = torch.Stream(device=group.device)

        self.slices = self.peers = self._workers
        """Of equal length, into which buffers have to be cut; and who exchange them."""

    @property
    def cut(self) -> Cut:
        """How buffers are cut in the present step."""
        return CUTS[0] if self._grain is None else self._grain.cut

    def wire_bytes(self, total: float) -> float:
        """Count what this worker sends for buffers of so many bytes in all."""
        return (self._own + 1) * (self._workers - 1) / self._workers * total

    def room(self, size: int) -> list[int]:
        """Say how many elements of room `start` needs for buffers of so many elements."""
        slices = size // self._workers
        if self._is_even:
            return [size]
        return [sum(self._counts) * slices, self._own * size]

    def prepare(self, layout: Layout) -> None:
        """Take note of new buckets. On all workers in the same step."""
        if not layout.within_node:  # finer cuts pay only where a network is in between
            self.try_cuts()

    def send(self, bucket: Bucket, layout: Layout) -> None:
        """Send a bucket's sums on their way. Collective, but doesn't block."""
        room = bucket.room(self.room(bucket.size))
        sums = [flat.content for flat in bucket.tree.values]
        self.start(sums, room, layout.most_at_once(bucket))

    def try_cuts(self) -> None:
        """Find out in the steps to come how finely to cut. On all workers in the same step.

        Only on the CPU: with a GPU's backend both stages follow each other on its stream.
        """
        if self._spreading is not None and self._grain is None:
            self._grain = ChunkTuner()

    def start(self, sums: Sequence[Tensor], room: Sequence[Tensor], most: int) -> list[Piece]:
        """Send this worker's sums on their way. Collective, but doesn't block.

        Args:
            sums: Of its subtrees, each (workers * slice,); the first one becomes the sum of all.
            room: To work in, of the sizes that `room` says; neither may be touched before `finish`,
                or let go of before `reset`.
            most: Elements that travel at once, a multiple of the workers' `ALIGNMENT`.

        Returns:
            What `has_come` wants to know.
        """
        if self._grain is not None:
            self._grain.begin()
        cut = self.cut
        # The views are cut once: the buffers of a layout are the same in every step.
        key = (*map(id, sums), *map(id, room), *cut)
        if key not in self._pieces:
            self._pieces[key] = list(self._cut(sums, room, most, cut))
        for piece in self._pieces[key]:
            self._start(piece)
        return self._pieces[key]

    def poll(self) -> None:
        """Go on with what has arrived. Doesn't block."""
        while self._first and all(
            _started(part.work).is_completed() for part in self._first[0].parts
        ):
            self._add_and_spread(self._first.popleft())

    def has_come(self, pieces: Sequence[Piece], within_s: float) -> bool:
        """Tell whether what `start` gave is complete, going on with what has arrived.

        Args:
            pieces: The first that aren't complete; those before them are.
            within_s: For how long to wait for a message.
        """
        self.poll()
        # The second stages come first: what is complete waits for nobody but the slowest anyway.
        if self._first and within_s:
            for part in self._first[0].parts:
                _is_over(_started(part.work), within_s)
            self.poll()
        left_s = 0.0 if self._first else within_s
        return all(piece.work is not None and _is_over(piece.work, left_s) for piece in pieces)

    def report(self, failure: int) -> None:
        """Tell the others how this worker's step was, after its last sums. Collective.

        Args:
            failure: Not 0 where something went wrong on this worker.
        """
        # Failure flags and measured times travel with the last sums, in one small all-to-all.
        sent, received = self._reports
        sent[:, 0] = failure
        if self._grain is not None and not self._grain.is_settled:
            sent[:, 1:] = torch.tensor(self._grain.report())
        self._report = dist.all_to_all_single(received, sent, group=self._scattering, async_op=True)

    def have_reported(self, within_s: float) -> bool:
        """Tell whether the others' reports have come.

        Args:
            within_s: For how long to wait for them.
        """
        return _is_over(_started(self._report), within_s)

    def finish(self, failure: int) -> bool:
        """Wait until all sums are complete. Collective.

        Args:
            failure: Not 0 where something went wrong on this worker.

        Returns:
            Whether something went wrong on any worker.
        """
        self.report(failure)
        return self.end()

    def end(self) -> bool:
        """Do what `finish` does after `report`."""
        _, received = self._reports
        # Stage 2 of what has not begun it, in the order of departure; then wait for all of it.
        while self._first:
            self._add_and_spread(self._first.popleft())
        _started(self._report).wait()
        for piece in self._second:
            _started(piece.work).wait()
        self._second.clear()
        # The cut is settled: views of the cuts that were tried are of no use any more.
        if self._grain is not None and self._grain.end(received[:, 1:]):
            self.reset()
        return bool(received[:, 0].any())

    def reset(self) -> None:
        """Release all buffers that were ever started. Local to the worker."""
        self._pieces.clear()

    def release(self) -> None:
        """Leave the process groups of its own. Local to the worker."""
        self.reset()
        # Leaving a group waits for what is under way. After an error that may be a first stage that
        # others never begin, while they wait for a second one of this worker's: so that goes first.
        for own in (self._spreading, self._scattering):
            if own is not None and dist.is_initialized():
                dist.destroy_process_group(own)
        self._scattering = self._spreading = None

    def _cut(
        self, sums: Sequence[Tensor], room: Sequence[Tensor], most: int, cut: Cut
    ) -> Iterator[Piece]:
        """Cut buffers into pieces, and these into equal, aligned parts; a small rest stays one."""
        slices, most_slices = len(sums[0]) // self._workers, most // self._workers
        # A piece is a whole number of aligned parts, none of them below MIN_BYTES.
        finest, least = cut.parts * ALIGNMENT, cut.parts * MIN_BYTES // sums[0].itemsize
        step = rounded_up(min(max(most_slices // cut.pieces, least), most_slices), finest)
        for begin in range(0, slices, step):
            end = min(begin + step, slices)
            is_cut = end - begin >= least and (end - begin) % finest == 0
            yield self._piece(sums, room, begin, end, cut.parts if is_cut else 1)

    def _piece(
        self, sums: Sequence[Tensor], room: Sequence[Tensor], begin: int, end: int, parts: int
    ) -> Piece:
        """Make a piece of what lies between these elements of a slice."""
        workers, count, length = self._workers, sum(self._counts), (end - begin) // parts
        # The memory of the first sums becomes that of the sum over all workers in stage 2.
        total = sums[0][workers * begin : workers * end]
        own = room[0][count * begin :][: end - begin]  # where earlier parts have been added up
        piece = Piece(parts=[], own=own, spread=total)
        # Each part adds up into its row of `own`; the all-gather collects all rows at once.
        if parts > 1:
            piece.own = own.view(parts, length)
            piece.spread = list(total.view(parts, workers, length).unbind(1))
        for low, there in zip(range(begin, end, length), own.view(parts, length), strict=True):
            high = low + length
            rows = room[0][count * low : count * high].view(count, length)
            # Sums grow in place, in the tree's order; the last addition writes to where it is sent
            # from.
            additions = [(rows[left], rows[right], rows[left]) for left, right in self._additions]
            left, right, _ = additions[-1]
            additions[-1] = left, right, there
            part = _Part(
                sums=[s[workers * low : workers * high] for s in sums],
                room=room[-1][self._own * workers * low : self._own * workers * high],
                received=rows.view(-1),
                additions=additions,
            )
            piece.parts.append(part)
        return piece

    def _start(self, piece: Piece) -> None:
        piece.work = None
        for part in piece.parts:
            part.work = self._scatter(part)
        if self._stream is None:
            self._first.append(piece)
            return
        # The sums must be complete on the script's stream before this one reads them.
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            self._add_and_spread(piece)

    def _scatter(self, part: _Part) -> dist.Work:
        """Begin stage 1 of a part: each worker gets its slice of all subtrees' sums."""
        if self._is_even:
            return _started(
                dist.all_to_all_single(
                    part.received, part.sums[0], group=self._scattering, async_op=True
                )
            )
        size = len(part.sums[0]) // self._workers
        # Several subtrees: interleave their slices so that each receiver's lie together.
        sent = part.room.view(self._workers, self._own, size)
        torch.stack([s.view(self._workers, size) for s in part.sums], 1, out=sent)
        output_splits = [count * size for count in self._counts]
        input_splits = [self._own * size] * self._workers
        return _started(
            dist.all_to_all_single(
                part.received,
                part.room,
                output_splits,
                input_splits,
                group=self._scattering,
                async_op=True,
            )
        )

    def _add_and_spread(self, piece: Piece) -> None:
        """Wait for stage 1, add up this worker's slice, and begin stage 2."""
        for part in piece.parts:
            _started(part.work).wait()
            # The tree's order, never the order of arrival.
            for left, right, there in part.additions:
                torch.add(left, right, out=there)
        group, own, spread = self._spreading, piece.own, piece.spread
        if isinstance(spread, Tensor):
            work = dist.all_gather_into_tensor(spread, own, group=group, async_op=True)
        else:
            work = dist.all_gather(spread, own, group=group, async_op=True)
        piece.work = _started(work)
        self._second.append(piece)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # it is asynchronous, and has been started
    return work


def _is_over(work: dist.Work, within_s: float) -> bool:
    """Wait a while for a collective.

    Raises:
        RuntimeError: It has failed.
    """
    if not work.is_completed() and within_s:  # to torch, 0 is no limit
        with suppress(RuntimeError):
            work.wait(timedelta(seconds=within_s))  # one that takes longer goes on
    if not work.is_completed():
        return False
    work.wait()
    return True


def another_group() -> dist.ProcessGroup:
    """Connect the workers once more by Gloo, with the timeout of their first group. Collective."""
    group = dist.new_group(backend="gloo", timeout=group_timeout())
    assert isinstance(group, dist.ProcessGroup)  # this worker is in it
    return group
