"""Low-rank factors of gradients: what PowerSGD computes for each bucket, in two stages.

Letters: a gradient is seen as a matrix (N, M); R columns are kept of it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor


@final
@dataclass(kw_only=True)
class LowRankState:
    """PowerSGD's state of one parameter."""

    error: Tensor
    """(N, M): what this worker's gradients have been short of so far."""
    basis: Tensor
    """(M, R): alike on all workers; where the next approximation begins."""


@final
@dataclass(kw_only=True)
class LowRankGradient:
    """A gradient, and its approximation by two factors."""

    gradient: Tensor
    state: LowRankState
    matrix: Tensor
    """(N, M): the gradient with its error, in memory of its own."""
    left: Tensor
    """(N, R)"""
    right: Tensor
    """(M, R)"""

    def apply(self) -> None:
        """Put the product into the gradient's place; all numbers are known to be finite."""
        # Error feedback, algorithm 2: e = (g + e) - P Q^T.
        self.state.error = self.matrix.addmm_(self.left, self.right.T, alpha=-1)
        self.state.basis = self.right
        self.gradient.copy_((self.left @ self.right.T).view(self.gradient.shape))

    def apply_where(self, finite: Tensor) -> None:
        """Do so if all numbers are finite, a tensor (); otherwise the gradient becomes NaN."""
        product = self.left @ self.right.T  # (N, M)
        self.state.error = torch.where(finite, self.matrix.sub_(product), self.state.error)
        self.state.basis = torch.where(finite, self.right, self.state.basis)
        self.gradient.copy_(torch.where(finite, product, torch.nan).view(self.gradient.shape))


@final
@dataclass(kw_only=True)
class Bucket:
    """Gradients of one device that are averaged together."""

    workers: int
    low_rank: list[LowRankGradient] = field(default_factory=list)
    whole: list[Tensor] = field(default_factory=list)
    """Gradients that travel as they are."""
    sent: list[Tensor] = field(default_factory=list)
    """What of them does: with what was left out before. From stage 2 on, their averages."""
    sums: list["_Sum"] = field(default_factory=list)
    """Averages that are being computed over the network."""
    finite: list[Tensor] = field(default_factory=list)
    """(): whether all numbers of a sum are."""

    @property
    def has_arrived(self) -> bool:
        """Whether the stage under way is complete, so that waiting for it takes no time."""
        return all(one.has_arrived for one in self.sums)

    def take(self, gradient: Tensor, state: LowRankState) -> None:
        """Project a gradient on its basis."""
        # Algorithm 1: P = M Q, where M is the gradient with its error; orthonormal columns for
        # stability.
        matrix = as_matrix(gradient) + state.error  # (N, M)
        left = _product(matrix, _orthonormal(state.basis))  # (N, R)
        self.low_rank.append(
            LowRankGradient(
                gradient=gradient, state=state, matrix=matrix, left=left, right=state.basis
            )
        )

    def take_whole(self, gradient: Tensor, state: LowRankState | None) -> None:
        """Take a gradient that is sent uncompressed, with its error from before, if any."""
        self.whole.append(gradient)
        sent = gradient if state is None else gradient + state.error.view(gradient.shape)
        self.sent.append(sent.to(gradient.dtype))

    def project(self, group: dist.ProcessGroup | None) -> None:
        """Send the messages of stage 1. Collective."""
        self._send([*self.sent, *(one.left for one in self.low_rank)], group)

    def project_back(
        self, group: dist.ProcessGroup | None, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Wait for the messages of stage 1, and send those of stage 2. Collective."""
        averages = self._received(waiting)
        self.sent = averages[: len(self.whole)]
        # P is averaged: orthonormalise it, and project back, Q = M^T P.
        for one, left in zip(self.low_rank, averages[len(self.whole) :], strict=True):
            one.left = _orthonormal(left)  # (N, R)
            one.right = _product(one.matrix.T, one.left)  # (M, R)
        self._send([one.right for one in self.low_rank], group)

    def end(self, waiting: Callable[[], AbstractContextManager[None]]) -> Tensor:
        """Wait for the messages of stage 2; say whether all numbers are finite, ()."""
        for one, right in zip(self.low_rank, self._received(waiting), strict=True):
            one.right = right
        return torch.stack(self.finite).all()

    def apply(self, finite: Tensor) -> None:
        """Put the averages into the gradients' places.

        Args:
            finite: (): whether all numbers of all buckets are; otherwise nothing is remembered.
        """
        for gradient, mean in zip(self.whole, self.sent, strict=True):
            gradient.copy_(mean)
        # On a GPU `bool` would wait for the device: `apply_where` decides there.
        is_known = finite.is_cpu and bool(finite)
        for one in self.low_rank:
            if is_known:
                one.apply()
            else:
                one.apply_where(finite.to(one.gradient.device))

    def _send(self, tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        """Average tensors, those of each type together. Collective."""
        places: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(tensor.dtype, []).append(place)
        self.sums = [_Sum(tensors, chosen, self.workers, group) for chosen in places.values()]

    def _received(self, waiting: Callable[[], AbstractContextManager[None]]) -> list[Tensor]:
        """Wait for the averages of what was sent, in that order."""
        averages: dict[int, Tensor] = {}
        for one in self.sums:
            with waiting():
                averages |= one.wait()
            self.finite.append(one.content.isfinite().all())
        return [averages[place] for place in range(len(averages))]


@final
class _Sum:
    """An average of several tensors of one type, on its way. Collective to begin."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        places: Sequence[int],
        workers: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Create the sum.

        Args:
            tensors: Of which those in `places` are averaged; they stay as they are.
            places: Which.
            workers: How many there are.
            group: Whose all-reduce it is.
        """
        self._like = {place: tensors[place] for place in places}
        parts = [tensor.reshape(-1) for tensor in self._like.values()]
        # Divided before the sum, so that a sum over many workers does not overflow.
        self.content = torch.cat(parts).div_(workers)
        work = dist.all_reduce(self.content, group=group, async_op=True) if workers > 1 else None
        self._work: dist.Work | None = work

    @property
    def has_arrived(self) -> bool:
        """Whether it is complete."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> dict[int, Tensor]:
        """Wait for the averages, by place."""
        if self._work is not None:
            self._work.wait()
        sizes = [tensor.numel() for tensor in self._like.values()]
        parts = zip(self._like.items(), self.content.split(sizes), strict=True)
        return {place: part.view(tensor.shape) for (place, tensor), part in parts}


def as_matrix(tensor: Tensor) -> Tensor:
    """See a gradient as a matrix, or copy it into one of fp32 at least: (N, M)."""
    return tensor.reshape(tensor.shape[0], -1).to(wide(tensor.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Give the type that is computed in: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _product(matrix: Tensor, factor: Tensor) -> Tensor:
    """Multiply (N, M) by (M, R): transposed, which the CPU does several times as fast."""
    return (factor.T.contiguous() @ matrix.T).T


def _orthonormal(matrix: Tensor) -> Tensor:
    """Give an orthonormal basis of the columns; of what isn't finite, anything."""
    basis: Tensor = torch.linalg.qr(matrix)[0]
    return basis
