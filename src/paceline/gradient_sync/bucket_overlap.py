"""Sends buckets of gradients during the backward pass, in the same order on all workers."""

from collections.abc import Mapping, Sequence
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.gradient_sync.buckets import gradient_is_gone, gradients_of

_LOOKS = 8
"""About how often a backward pass of several buckets looks for those that have arrived."""


@runtime_checkable
class BucketAverager(Protocol):
    """Averages gradients bucket by bucket, overlapped with the backward pass."""

    def buckets(self, like: Mapping[str, Tensor]) -> list[list[str]]:
        """Say which gradients leave together, in which order. Collective with other names.

        Args:
            like: Parameters by name, in the order of the model.
        """

    def open_stream(self, device: torch.device) -> None:
        """Make it possible to `start` and `poll` while a backward pass runs. Collective."""

    def start(self, names: Sequence[str], gradients: list[Tensor]) -> None:
        """Start to average one bucket. Collective, but doesn't block.

        Args:
            names: One of `buckets`.
            gradients: All of it, in its order.
        """

    def poll(self) -> None:
        """Start the next stage of buckets that have arrived. Collective, but doesn't block.

        An averager without later stages says so by `has_stages = False`: it isn't called between
        the ends of buckets then.
        """

    def finish(self, *, keep: bool = True) -> Mapping[str, Tensor]:
        """Wait for all buckets, and average what they brought in place. Collective.

        Args:
            keep: Whether to; otherwise it is as if they had never left.

        Returns:
            By name: the averages that are in a place of their own instead.
        """


@final
class BucketOverlap:
    """Starts each bucket's average once its gradients and all earlier buckets are complete."""

    def __init__(self, averager: BucketAverager, parameters: Mapping[str, nn.Parameter]) -> None:
        """Create the bucket overlap.

        Args:
            averager: What averages them; its stream is open.
            parameters: Those that get a gradient, by name, in the order of the model.
        """
        self._averager = averager
        self._parameters = parameters
        self._buckets = averager.buckets(parameters)
        self._parameters_of = [[parameters[name] for name in names] for names in self._buckets]
        self._arrived: set[str] = set()
        self._left = 0
        self._addresses: set[int] = set()
        """Of the last averages that are in memory of their own."""
        self._waits = False
        """Whether nothing more leaves before `finish`."""

    def looks_at(self, order: Sequence[str]) -> list[str]:
        """Choose parameters with whose gradients it pays to call `arrive`.

        Args:
            order: All, in the order in which their gradients come.
        """
        position = {name: i for i, name in enumerate(order)}
        ends = {max(names, key=position.__getitem__) for names in self._buckets}
        # Buckets that are under way may have later stages.
        looks_between = getattr(self._averager, "has_stages", True) and len(self._buckets) > 1
        between = order[:: -(-len(order) // _LOOKS)] if looks_between else ()
        return [name for name in order if name in ends or name in between]

    def arrive(self, names: Sequence[str], *, starts: bool = True) -> None:
        """Take gradients that are most likely complete. Collective, but doesn't block.

        If one comes again before `finish` (a second backward pass, or a segment of the model that
        is run twice), what has left so far counts for nothing, and nothing more leaves before
        `finish`.

        Args:
            names: Of the parameters, in the order in which they came.
            starts: Whether complete buckets leave.

        Raises:
            UsageError: A parameter of a complete bucket has no gradient any more.
        """
        before = len(self._arrived)
        self._arrived.update(names)
        if len(self._arrived) < before + len(names):
            self.discard()
            self._waits = True
        if not starts:
            return
        # Strictly in order: collectives must begin in the same order on all workers.
        while not self._waits and self._left < len(self._buckets):
            if not self._arrived.issuperset(self._buckets[self._left]):
                break
            gradients = self._gradients()
            # Set to zero, not to None, the last average is what the next gradients are added to:
            # what has left would take the place of those that are still to come.
            if self._are_averages(gradients):
                self._waits = True
            else:
                self._start(gradients)
        self._averager.poll()

    def finish(self) -> Mapping[str, Tensor]:
        """Send what hasn't left, and wait until all gradients are averages. Collective.

        Returns:
            As the averager's `finish`.
        """
        while self._left < len(self._buckets):
            self._start(self._gradients())
        averages = self._averager.finish()
        self._addresses = {tensor.data_ptr() for tensor in averages.values() if tensor.numel()}
        self._forget()
        return averages

    def discard(self) -> None:
        """Wait for what has left, and leave all gradients as they are. Collective."""
        self._averager.finish(keep=False)
        self._forget()

    def _gradients(self) -> list[Tensor]:
        """Give those of the next bucket."""
        gradients = gradients_of(self._parameters_of[self._left])
        if gradients is None:
            names = self._buckets[self._left]
            raise gradient_is_gone(next(n for n in names if self._parameters[n].grad is None))
        return gradients

    def _are_averages(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether gradients of the next bucket share memory with the last averages."""
        # By address: a script may have made other tensors of the same memory.
        return any(gradient.data_ptr() in self._addresses for gradient in gradients)

    def _start(self, gradients: list[Tensor]) -> None:
        """Start to average the next bucket."""
        self._averager.start(self._buckets[self._left], gradients)
        self._left += 1

    def _forget(self) -> None:
        self._left, self._waits = 0, False
        self._arrived.clear()
