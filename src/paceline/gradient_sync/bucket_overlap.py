"""Buckets of gradients that leave during the backward pass, in the same order on all workers."""

from collections.abc import Mapping
from typing import final

from torch import Tensor, nn

from paceline.gradient_sync.powersgd import PowerSGD


@final
class BucketOverlap:
    """Starts each bucket once all its gradients, and those of the buckets before it, are there."""

    def __init__(self, averager: PowerSGD, parameters: Mapping[str, nn.Parameter]) -> None:
        """Args:
        averager: What averages them; its stream is open.
        parameters: Those that get a gradient, by name, in the order of the model.
        """
        self._averager = averager
        self._buckets = averager.buckets(parameters)
        self._place = {n: place for place, names in enumerate(self._buckets) for n in names}
        self._come: list[dict[str, Tensor]] = [{} for _ in self._buckets]
        self._left = 0

    def arrive(self, name: str, gradient: Tensor) -> None:
        """Take a gradient that is complete, most likely. Collective, but waits for nobody.

        If one comes again before `finish` (a second backward pass, or a segment of the model that
        is run twice), what has left so far counts for nothing.

        Args:
            name: Of the parameter.
            gradient: As it is in the parameter.
        """
        come = self._come[self._place[name]]
        if name in come:
            self.discard()
        come[name] = gradient
        # Strictly in order: collectives must begin in the same order on all workers.
        while self._left < len(self._buckets) and self._is_complete(self._left):
            self._start(self._come[self._left])
        self._averager.poll()

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        """Send what hasn't left, and wait until all gradients are averages. Collective.

        Args:
            gradients: Of all parameters.
        """
        while self._left < len(self._buckets):
            self._start(gradients)
        self._averager.finish()
        self._forget()

    def discard(self) -> None:
        """Wait for what has left, and leave all gradients as they are. Collective."""
        self._averager.finish(keep=False)
        self._forget()

    def _is_complete(self, place: int) -> bool:
        return len(self._come[place]) == len(self._buckets[place])

    def _start(self, gradients: Mapping[str, Tensor]) -> None:
        """Let the next bucket go."""
        self._averager.start({name: gradients[name] for name in self._buckets[self._left]})
        self._left += 1

    def _forget(self) -> None:
        self._left = 0
        for come in self._come:
            come.clear()
