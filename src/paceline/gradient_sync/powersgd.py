"""PowerSGD: averages gradients as two low-rank factors each, with error feedback.

Vogels, Karimireddy and Jaggi, "PowerSGD", 2019 (arXiv 1905.13727), algorithms 1 and 2.
Letters: a gradient is seen as a matrix (N, M); R columns are kept of it.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from math import ceil
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.device import is_accelerator
from paceline.gradient_sync.bucketing import group_by_bytes
from paceline.gradient_sync.low_rank import Bucket, LowRankState, as_matrix, wide
from paceline.gradient_sync.network_model import ring_bytes
from paceline.gradient_sync.options import POWERSGD_BUCKETS
from paceline.gradient_sync.ordered.exchange import another_group

_MIN_GAIN = 2
"""A matrix is left as it is unless this takes fewer bytes by more than this factor."""


def _no_scale() -> float:
    return 1.0


@final
class PowerSGD:
    """Averages a model's gradients over the workers, approximately; with one worker, exactly.

    PyTorch's own hook has the same mathematics, but deadlocks or fails in cases that are needed
    here: it waits within callbacks, of which Gloo runs two at a time, so that two buckets wait for
    each other forever; it waits for a GPU that CPU tensors don't have; and its state belongs to
    buckets, which may be others when a training is resumed.

    What it needs of the backend is all-reduce alone. A step is either `average_`, or `start` with
    each of `buckets` in turn and then `finish`; the bits are the same.
    """

    def __init__(
        self,
        workers: int,
        rank: int,
        loss_scale: Callable[[], float | Tensor] = _no_scale,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the power SGD.

        Args:
            workers: How many there are.
            rank: Columns that are kept of each gradient.
            loss_scale: What gradients are multiplied by at the moment, alike on all workers; a
                tensor () on their device isn't waited for.
            waiting: Is around each wait for the other workers: the rest is this one's own
                computing.
        """
        self.low_rank: dict[str, LowRankState] = {}
        """By the parameter's name; of those that have been approximated."""
        self.scale: float | Tensor = 1.0
        """What the errors are multiplied by: a loss scale of the past."""
        self._workers, self._rank, self._loss_scale = workers, rank, loss_scale
        self._waiting = waiting
        self._first: deque[Bucket] = deque()
        self._second: list[Bucket] = []
        self._given_back: list[str] = []
        """Names of what is on its way as it is, with the error of a time when it wasn't."""
        self._kinds: set[str] = set()
        """Types of devices that gradients are on."""
        self._groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
        """For the two stages; None: the workers' own."""
        self._stream: torch.Stream | None = None

    def average_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace gradients by an approximation of their average. Collective, blocks.

        Bucket by bucket, all of them on their way at once:

        1. What isn't worth it is averaged as it is. Each other gradient, with its error added, is
           projected on its basis; projections are averaged.
        2. They become orthonormal, and each matrix is projected on them; that is averaged as well,
           and is the next basis.
        3. The product takes the gradient's place; what it lacks is the next error.

        Args:
            gradients: By name; the same names and order on all workers. One that isn't finite makes
                all of them so everywhere, and nothing of it is remembered.
        """
        for names in self.buckets(gradients):
            self.start(names, [gradients[name] for name in names])
        self.finish()

    def buckets(self, like: Mapping[str, Tensor]) -> list[list[str]]:
        """Cut gradients into buckets, the last ones first: a backward pass makes them so, mostly.

        Args:
            like: Parameters or gradients by name, in the order of the model.
        """
        full = ceil(sum(tensor.nbytes for tensor in like.values()) / POWERSGD_BUCKETS)
        by_device: dict[torch.device, list[str]] = {}
        for name in list(like)[::-1]:
            by_device.setdefault(like[name].device, []).append(name)
        return [
            [names[place] for place in places]
            for names in by_device.values()
            for places in group_by_bytes([like[name].nbytes for name in names], full, full)
        ]

    def open_stream(self, device: torch.device) -> None:
        """Make it possible to `start` and `poll` while a backward pass runs. Collective.

        On the CPU each stage gets a process group of its own: when the second one can begin, and
        another model's buckets leave, may differ between workers, and collectives of one group must
        begin in one order. A GPU takes both stages one after another in a stream of its own.
        """
        if is_accelerator(device):
            self._stream = self._stream or torch.Stream(device=device)
        elif self._groups[0] is None:
            self._groups = another_group(), another_group()

    @torch.no_grad()
    def start(self, names: Sequence[str], gradients: list[Tensor]) -> None:
        """Start stage 1 of one bucket. Collective, but doesn't block.

        Args:
            names: One of `buckets`.
            gradients: Of these. They stay as they are until `finish`: their memory may be that of
                others, which a backward pass still needs.
        """
        # The first bucket of a step: the loss scale may have changed since the last one.
        if not self._first and not self._second:
            self._rescale()
        self._kinds |= {gradient.device.type for gradient in gradients}
        with self._side_stream():
            # Large matrices are projected; the rest joins whole, with any error of its time as a
            # matrix.
            bucket = Bucket(workers=self._workers)
            for name, gradient in zip(names, gradients, strict=True):
                if self._columns(gradient) > 0:
                    bucket.take(gradient, self.begin(name, gradient))
                else:
                    bucket.take_whole(gradient, self.low_rank.get(name))
                    self._given_back.append(name)
            # Stage 1 leaves. A stream orders stage 2 behind it; on the CPU `poll` starts it.
            bucket.project(self._groups[0])
            self._first.append(bucket)
            if self._stream is not None:
                self._advance()

    @torch.no_grad()
    def poll(self) -> None:
        """Start stage 2 of arrived buckets; after `open_stream`. Collective, but doesn't block."""
        while self._first and self._first[0].has_arrived:
            with self._side_stream():
                self._advance()

    @torch.no_grad()
    def finish(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Wait for all buckets, and put the averages into the gradients' places. Collective.

        Args:
            keep: Whether to; otherwise it is as if they had never left.

        Returns:
            Nothing: no average has memory of its own.
        """
        waiting = self._waiting if self._stream is None else nullcontext
        with self._side_stream():
            # Stage 2 of whatever has not begun it, in the order in which buckets left.
            while self._first:
                self._advance(waiting)
            flags = [bucket.end(waiting) for bucket in self._second]
            # One infinite number anywhere discards the step: no bucket remembers its error then.
            if flags and keep:
                finite = torch.stack([flag.to(flags[0].device) for flag in flags]).all()
                for bucket in self._second:
                    bucket.apply(finite)
                for name in self._given_back:
                    self.low_rank.pop(name, None)
        # What the script computes next, on its own stream, comes after the averages.
        if self._stream is not None:
            with self._waiting():
                torch.accelerator.current_stream().wait_stream(self._stream)
        self._second.clear()
        self._given_back.clear()
        return {}

    def release(self) -> None:
        """Leave the process groups of its own. Local to the worker.

        Where a failure has left something on its way they end with the process: to leave them would
        be to wait for the others.
        """
        if not self._first and not self._second and dist.is_initialized():
            for group in self._groups:
                if group is not None:
                    dist.destroy_process_group(group)
        self._groups = None, None

    def wire_bytes(self, tensors: Sequence[Tensor]) -> float:
        """Count what one worker sends for gradients of these parameters."""
        return ring_bytes(sum(map(self._sent_bytes, tensors)), self._workers)

    def begin(self, name: str, like: Tensor) -> LowRankState:
        """Give a parameter's memory, a fresh one where there is none. Local to the worker.

        Args:
            name: Of the parameter, which settles the first basis.
            like: The parameter or its gradient.
        """
        if name not in self.low_rank:
            matrix = as_matrix(like)
            rows, columns = matrix.shape
            # The first basis depends on the name alone: the same on all workers and in every start.
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            basis = torch.randn(columns, self._columns(like), generator=generator)
            self.low_rank[name] = LowRankState(
                error=torch.zeros(rows, columns, dtype=matrix.dtype, device=matrix.device),
                basis=basis.to(matrix),
            )
        return self.low_rank[name]

    def _advance(self, waiting: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Take the first bucket to stage 2. Collective, blocks until it has arrived."""
        bucket = self._first.popleft()
        bucket.project_back(self._groups[1], waiting)
        self._second.append(bucket)

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Compute without the script's autocast, in the stream of its own where there is one."""
        with ExitStack() as stack:
            for kind in self._kinds:
                # Gradients are averaged in their own precision, even within the script's autocast.
                stack.enter_context(torch.autocast(kind, enabled=False))
            if self._stream is not None:
                self._stream.wait_stream(torch.accelerator.current_stream())
                stack.enter_context(self._stream)
            yield

    def _rescale(self) -> None:
        """Bring the errors to the scale that gradients have now: a power of two, mostly."""
        now = self._loss_scale()
        if isinstance(now, Tensor):
            now = now.clone()
        # One on the device counts as changed: to compare it would wait for the device.
        if self.low_rank and (isinstance(now, Tensor) or now != self.scale):
            errors = [state.error for state in self.low_rank.values()]
            torch._foreach_mul_(errors, now / self.scale)
        self.scale = now

    def _columns(self, tensor: Tensor) -> int:
        """Give the number of columns kept of a gradient; 0 if it is sent uncompressed."""
        if tensor.dim() < 2 or self._workers == 1 or not tensor.is_floating_point():
            return 0
        # Two factors (N, R) and (M, R) against the whole (N, M).
        rows = max(1, tensor.shape[0])
        columns = tensor.numel() // rows
        kept = min(rows, columns, self._rank)
        return kept if (rows + columns) * kept * _MIN_GAIN < rows * columns else 0

    def _sent_bytes(self, tensor: Tensor) -> int:
        kept = self._columns(tensor)
        if kept == 0:
            return tensor.nbytes
        rows = tensor.shape[0]
        return (rows + tensor.numel() // rows) * kept * wide(tensor.dtype).itemsize
