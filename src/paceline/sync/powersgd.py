"""Gradients that travel as two thin matrices each, with what that leaves out added the next time.

Vogels, Karimireddy and Jaggi, "PowerSGD", 2019 (arXiv 1905.13727), algorithms 1 and 2. PyTorch's
own hook has the same mathematics. It waits within callbacks, of which Gloo runs two at a time, so
that two buckets (two models, two types of parameters) wait for each other forever; it waits for a
GPU that CPU tensors don't have; and its state belongs to buckets, which another start of a training
may cut otherwise.

Letters: a gradient is seen as a matrix (N, M); R columns are kept of it.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.sync.buckets import MOST_BYTES, cut
from paceline.sync.exchange import another_group
from paceline.sync.network import ring_bytes
from paceline.sync.options import POWERSGD_BUCKETS

_LEAST_GAIN = 2
"""A matrix is left as it is unless this takes fewer bytes by more than this factor."""


def _no_scale() -> float:
    return 1.0


@final
@dataclass(kw_only=True)
class Thin:
    """What is remembered of one parameter."""

    error: Tensor
    """(N, M): what this worker's gradients have been short of so far."""
    basis: Tensor
    """(M, R): alike on all workers; where the next approximation begins."""


@final
class PowerSGD:
    """Averages a model's gradients over the workers, approximately; with one worker, exactly.

    What it needs of the backend is all-reduce alone. A step is either `average_`, or `start` with
    each of `buckets` in turn and then `finish`; the bits are the same.
    """

    def __init__(
        self,
        workers: int,
        rank: int,
        loss_scale: Callable[[], float] = _no_scale,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Args:
        workers: How many there are.
        rank: Columns that are kept of each gradient.
        loss_scale: What gradients are multiplied by at the moment, alike on all workers.
        waiting: Is around each wait for the other workers: the rest is this one's own computing.
        """
        self.thin: dict[str, Thin] = {}
        """By the parameter's name; of those that have been approximated."""
        self.scale = 1.0
        """What the errors are multiplied by: a loss scale of the past."""
        self._workers, self._rank, self._loss_scale = workers, rank, loss_scale
        self._waiting = waiting
        self._first: deque[_Bucket] = deque()
        self._second: list[_Bucket] = []
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
            self.start({name: gradients[name] for name in names})
        self.finish()

    def buckets(self, like: Mapping[str, Tensor]) -> list[list[str]]:
        """Cut gradients into buckets, the last ones first: a backward pass makes them so, mostly.

        Args:
            like: Parameters or gradients by name, in the order of the model.
        """
        names = list(like)[::-1]
        sizes = [like[name].nbytes for name in names]
        most = min(MOST_BYTES, sum(sizes) // POWERSGD_BUCKETS)
        kinds = [f"{like[name].dtype} {like[name].device}" for name in names]
        return [[names[place] for place in places] for places in cut(sizes, kinds, most, most)]

    def open_stream(self, device: torch.device) -> None:
        """Make it possible to go on with `poll` while a backward pass runs. Collective.

        On the CPU each stage gets a process group of its own: when the second one can begin, and
        another model's buckets leave, may differ between workers, and collectives of one group must
        begin in one order. A GPU takes both stages one after another in a stream of its own.
        """
        if device.type != "cpu":
            self._stream = self._stream or torch.Stream(device=device)
        elif self._groups[0] is None:
            self._groups = another_group(), another_group()

    @torch.no_grad()
    def start(self, gradients: Mapping[str, Tensor]) -> None:
        """Let one bucket go: stage 1. Collective, but doesn't block.

        Args:
            gradients: Of one of `buckets`; they are changed from here on.
        """
        if not self._first and not self._second:
            self._rescale()
        chosen = {n: g for n, g in gradients.items() if self._columns(g) > 0}
        rest = {name: g for name, g in gradients.items() if name not in chosen}
        self._give_back(rest)
        if self._workers == 1:
            return
        with self._aside():
            bucket = _Bucket(gradients=list(chosen.values()), rest=list(rest.values()))
            thins = [self.begin(name, gradient) for name, gradient in chosen.items()]
            bucket.project(thins, self._workers, self._groups[0])
            self._first.append(bucket)
            if self._stream is not None:
                self._go_on()

    @torch.no_grad()
    def poll(self) -> None:
        """Go on with what has arrived. Local to the worker, after `open_stream`; doesn't block."""
        while self._first and self._first[0].has_arrived:
            self._go_on()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all buckets, and put the averages into their places. Collective."""
        with self._aside():
            while self._first:
                self._go_on()
            flags = [bucket.end(self._waiting) for bucket in self._second]
            if flags:
                finite = torch.stack([flag.to(flags[0].device) for flag in flags]).all()
                for bucket in self._second:
                    bucket.apply(finite.to(bucket.device))
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        self._second.clear()

    def release(self) -> None:
        """Leave the process groups of its own. Local to the worker."""
        for group in self._groups:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups = None, None

    def wire_bytes(self, tensors: Sequence[Tensor]) -> float:
        """Count what one worker sends for gradients of these parameters."""
        return ring_bytes(sum(map(self._sent_bytes, tensors)), self._workers)

    def begin(self, name: str, like: Tensor) -> Thin:
        """Give a parameter's memory, a fresh one where there is none. Local to the worker.

        Args:
            name: Of the parameter, which settles the first basis.
            like: The parameter or its gradient.
        """
        if name not in self.thin:
            matrix = _matrix(like)
            rows, columns = matrix.shape
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            basis = torch.randn(columns, self._columns(like), generator=generator)
            self.thin[name] = Thin(
                error=torch.zeros(rows, columns, dtype=matrix.dtype, device=matrix.device),
                basis=basis.to(matrix),
            )
        return self.thin[name]

    def _go_on(self) -> None:
        """Take the first bucket to stage 2. Collective, blocks until it has arrived."""
        bucket = self._first.popleft()
        bucket.project_back(self._workers, self._waiting, self._groups[1])
        self._second.append(bucket)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Compute in the stream of its own, where there is one, after what is under way."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            yield

    def _give_back(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the errors of what is approximated no more: one worker is left, or the rank grew."""
        for name, gradient in gradients.items():
            thin = self.thin.pop(name, None)
            if thin is not None:
                gradient.add_(thin.error.view(gradient.shape))

    def _rescale(self) -> None:
        """Bring the errors to the scale that gradients have now: a power of two, mostly."""
        now = self._loss_scale()
        if now != self.scale and self.thin:
            torch._foreach_mul_([thin.error for thin in self.thin.values()], now / self.scale)
        self.scale = now

    def _columns(self, tensor: Tensor) -> int:
        """Say how many columns are kept of a gradient; 0 where it travels as it is."""
        if tensor.dim() < 2 or self._workers == 1 or not tensor.is_floating_point():
            return 0
        rows = max(1, tensor.shape[0])
        columns = tensor.numel() // rows
        kept = min(rows, columns, self._rank)
        return kept if (rows + columns) * kept * _LEAST_GAIN < rows * columns else 0

    def _sent_bytes(self, tensor: Tensor) -> int:
        kept = self._columns(tensor)
        if kept == 0:
            return tensor.nbytes
        rows = tensor.shape[0]
        return (rows + tensor.numel() // rows) * kept * _wide(tensor.dtype).itemsize


@final
@dataclass(kw_only=True)
class _Bucket:
    """Gradients of one type and device on their way."""

    gradients: list[Tensor]
    """Those that are approximated."""
    rest: list[Tensor]
    """Those that travel as they are."""
    thins: list[Thin] = field(default_factory=list)
    matrices: list[Tensor] = field(default_factory=list)
    """(N, M) of each gradient with its error: in the gradient's own memory where that can be."""
    lefts: list[Tensor] = field(default_factory=list)
    """(N, R) of each."""
    rights: list[Tensor] = field(default_factory=list)
    """(M, R) of each."""
    sums: list["_Sum"] = field(default_factory=list)
    """What is on the wire."""
    finite: list[Tensor] = field(default_factory=list)
    """(): whether all numbers of a sum are."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return (self.gradients or self.rest)[0].device

    @property
    def has_arrived(self) -> bool:
        """Whether the stage under way is complete, so that waiting for it takes no time."""
        return all(one.has_arrived for one in self.sums)

    def project(self, thins: list[Thin], workers: int, group: dist.ProcessGroup | None) -> None:
        """Go through step 1 until its messages leave. Collective."""
        self.thins, self.matrices = thins, [_matrix(gradient) for gradient in self.gradients]
        for matrix, thin in zip(self.matrices, thins, strict=True):
            matrix.add_(thin.error)
        bases = [_orthonormal(thin.basis) for thin in thins]
        self.lefts = [_product(m, basis) for m, basis in zip(self.matrices, bases, strict=True)]
        self.sums = [_Sum(part, workers, group) for part in _by_type([*self.rest, *self.lefts])]

    def project_back(
        self,
        workers: int,
        waiting: Callable[[], AbstractContextManager[None]],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Go through step 2 until its messages leave. Collective, waits for those of step 1."""
        self._take(waiting)
        self.lefts = [_orthonormal(left) for left in self.lefts]
        of_each = zip(self.matrices, self.lefts, strict=True)
        self.rights = [_product(matrix.T, left) for matrix, left in of_each]
        self.sums = [_Sum(part, workers, group) for part in _by_type(self.rights)]

    def end(self, waiting: Callable[[], AbstractContextManager[None]]) -> Tensor:
        """Wait for the messages of step 2; say whether all numbers are finite, ()."""
        self._take(waiting)
        return torch.stack(self.finite).all()

    def apply(self, finite: Tensor) -> None:
        """Go through step 3.

        Args:
            finite: (): whether all gradients are; otherwise nothing is remembered.
        """
        if finite.device.type == "cpu" and finite:
            self._apply_in_place()
            return
        of_each = zip(
            self.gradients, self.thins, self.matrices, self.lefts, self.rights, strict=True
        )
        for gradient, thin, matrix, left, right in of_each:
            product = left @ right.T  # (N, M)
            thin.error = torch.where(finite, matrix - product, thin.error)
            thin.basis = torch.where(finite, right, thin.basis)
            gradient.copy_(torch.where(finite, product, torch.nan).view(gradient.shape))

    def _apply_in_place(self) -> None:
        """Do the same where it is known that all are finite: without memory of its own."""
        of_each = zip(
            self.gradients, self.thins, self.matrices, self.lefts, self.rights, strict=True
        )
        for gradient, thin, matrix, left, right in of_each:
            thin.error.copy_(matrix).addmm_(left, right.T, alpha=-1)
            thin.basis = right
            torch.mm(left, right.T, out=matrix)
            if matrix.data_ptr() != gradient.data_ptr():
                gradient.copy_(matrix.view(gradient.shape))

    def _take(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Wait for what is on the wire, and put it into its places."""
        for one in self.sums:
            one.finish(waiting())
            self.finite.append(one.content.isfinite().all())


@final
class _Sum:
    """An average of several tensors of one type, on its way. Collective to begin."""

    def __init__(
        self, tensors: Sequence[Tensor], workers: int, group: dist.ProcessGroup | None
    ) -> None:
        self._tensors = tensors
        self.content = torch.cat([t.reshape(-1) for t in tensors]).div_(workers)
        work = dist.all_reduce(self.content, group=group, async_op=True)
        assert work is not None  # it is asynchronous
        self._work: dist.Work = work

    @property
    def has_arrived(self) -> bool:
        """Whether it is complete."""
        return self._work.is_completed()

    def finish(self, waiting: AbstractContextManager[None]) -> None:
        """Wait for it, and put it in the place of the tensors.

        Args:
            waiting: Is around the wait.
        """
        with waiting:
            self._work.wait()
        parts = self.content.split([t.numel() for t in self._tensors])
        for tensor, part in zip(self._tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _matrix(tensor: Tensor) -> Tensor:
    """See a gradient as a matrix, or copy it into one of fp32 at least: (N, M)."""
    return tensor.reshape(tensor.shape[0], -1).to(_wide(tensor.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _product(matrix: Tensor, thin: Tensor) -> Tensor:
    """Multiply (N, M) by (M, R): transposed, which the CPU does several times as fast."""
    return (thin.T.contiguous() @ matrix.T).T


def _orthonormal(matrix: Tensor) -> Tensor:
    """Give an orthonormal basis of the columns; of what isn't finite, anything."""
    basis: Tensor = torch.linalg.qr(matrix)[0]
    return basis


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can travel together."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
