"""Gradients that travel as two thin matrices each, with what that leaves out added the next time.

Vogels, Karimireddy and Jaggi, "PowerSGD", 2019 (arXiv 1905.13727), algorithms 1 and 2. PyTorch's
own hook has the same mathematics. It waits within callbacks, of which Gloo runs two at a time, so
that two buckets (two models, two types of parameters) wait for each other forever; it waits for a
GPU that CPU tensors don't have; and its state belongs to buckets, which another start of a training
may cut otherwise.

Letters: a gradient is seen as a matrix (N, M); R columns are kept of it.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.sync.network import ring_bytes

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

    What it needs of the backend is all-reduce alone.
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

    @torch.no_grad()
    def average_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace gradients by an approximation of their average. Collective, blocks.

        1. What isn't worth it is averaged as it is; it travels while the rest is computed.
        2. Each matrix, with its error added, is projected on its basis; projections are averaged.
        3. They become orthonormal, and each matrix is projected on them; that is averaged as well,
           and is the next basis.
        4. The product takes the gradient's place; what it lacks is the next error.

        Args:
            gradients: By name; the same names and order on all workers. One that isn't finite makes
                all of them so everywhere, and nothing of it is remembered.
        """
        self._rescale()
        chosen = {n: g for n, g in gradients.items() if self._columns(g) > 0}
        rest = {name: g for name, g in gradients.items() if name not in chosen}
        self._give_back(rest)
        if self._workers == 1:
            return
        sums = [_Sum(part, self._workers) for part in _by_kind(list(rest.values()))]
        thins = [
            self._projected({name: chosen[name] for name in names})
            for names in _names_by_kind(chosen)
        ]
        for one in sums:
            one.finish(self._waiting())
        if not thins:
            return
        place = thins[0].finite.device
        finite = [one.content.isfinite().all() for one in sums] + [one.finite for one in thins]
        all_finite = torch.stack([flag.to(place) for flag in finite]).all()
        for one_kind in thins:
            one_kind.apply(all_finite)

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

    def _projected(self, gradients: Mapping[str, Tensor]) -> "_Projected":
        """Go through steps 2 and 3 with gradients of one kind. Collective."""
        thins = [self.begin(name, gradient) for name, gradient in gradients.items()]
        matrices = [_matrix(gradient) for gradient in gradients.values()]
        for matrix, thin in zip(matrices, thins, strict=True):
            matrix.add_(thin.error)
        lefts = [
            _product(m, _orthonormal(t.basis)) for m, t in zip(matrices, thins, strict=True)
        ]  # (N, R)
        finite = self._averaged(lefts)
        lefts = [_orthonormal(left) for left in lefts]
        rights = [_product(m.T, left) for m, left in zip(matrices, lefts, strict=True)]  # (M, R)
        finite = finite & self._averaged(rights)
        of_each = zip(gradients.values(), thins, matrices, lefts, rights, strict=True)
        return _Projected(finite=finite, of_each=list(of_each))

    def _give_back(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the errors of what is approximated no more: one worker is left, or the rank grew."""
        for name, gradient in gradients.items():
            thin = self.thin.pop(name, None)
            if thin is not None:
                gradient.add_(thin.error.view(gradient.shape))

    def _averaged(self, matrices: list[Tensor]) -> Tensor:
        """Average matrices over all workers, in place. Collective.

        Returns:
            Whether all are finite, () on their device.
        """
        one = _Sum(matrices, self._workers)
        one.finish(self._waiting())
        return one.content.isfinite().all()

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
class _Projected:
    """Gradients of one kind whose approximations are known."""

    finite: Tensor
    """(): whether all numbers are."""
    of_each: list[tuple[Tensor, Thin, Tensor, Tensor, Tensor]]
    """Gradient, what is remembered, (N, M) with the error, (N, R), (M, R). The third is the memory
    of the first where that can be seen as it."""

    def apply(self, finite: Tensor) -> None:
        """Go through step 4.

        Args:
            finite: (): whether all gradients are; otherwise nothing is remembered.
        """
        finite = finite.to(self.finite.device)
        if finite.device.type == "cpu" and finite:
            self._apply_in_place()
            return
        for gradient, thin, matrix, left, right in self.of_each:
            product = left @ right.T  # (N, M)
            thin.error = torch.where(finite, matrix - product, thin.error)
            thin.basis = torch.where(finite, right, thin.basis)
            gradient.copy_(torch.where(finite, product, torch.nan).view(gradient.shape))

    def _apply_in_place(self) -> None:
        """Do the same where it is known that all are finite: without memory of its own."""
        for gradient, thin, matrix, left, right in self.of_each:
            thin.error.copy_(matrix).addmm_(left, right.T, alpha=-1)
            thin.basis = right
            torch.mm(left, right.T, out=matrix)
            if matrix.data_ptr() != gradient.data_ptr():
                gradient.copy_(matrix.view(gradient.shape))


@final
class _Sum:
    """An average of several tensors of one kind, on its way. Collective to begin."""

    def __init__(self, tensors: Sequence[Tensor], workers: int) -> None:
        self._tensors = tensors
        self.content = torch.cat([t.reshape(-1) for t in tensors]).div_(workers)
        self._work = dist.all_reduce(self.content, async_op=True)

    def finish(self, waiting: AbstractContextManager[None]) -> None:
        """Wait for it, and put it in the place of the tensors.

        Args:
            waiting: Is around the wait.
        """
        assert self._work is not None  # it is asynchronous
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


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can travel together."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _names_by_kind(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    groups: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((_wide(tensor.dtype), tensor.device), []).append(name)
    return list(groups.values())
