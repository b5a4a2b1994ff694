"""Buckets of gradients that leave during the backward pass, in the same order on all workers."""

from collections.abc import Mapping
from typing import final

from torch import Tensor, nn

from paceline.errors import JobError
from paceline.sync.powersgd import PowerSGD


@final
class Departures:
    """Starts each bucket once all its gradients, and those of the buckets before it, are there."""

    def __init__(self, averager: PowerSGD, parameters: Mapping[str, nn.Parameter]) -> None:
        """Args:
        averager: What averages them; its stream is open.
        parameters: All that get a gradient in every step, by name, in the order of the model.
        """
        self._averager = averager
        self._buckets = averager.buckets(parameters)
        self._place = {n: place for place, names in enumerate(self._buckets) for n in names}
        self._come: list[dict[str, Tensor]] = [{} for _ in self._buckets]
        self._left = 0

    @property
    def all_left(self) -> bool:
        """Whether all buckets are on their way."""
        return self._left == len(self._buckets)

    def arrive(self, name: str, gradient: Tensor) -> None:
        """Take a gradient that is complete. Doesn't block.

        Args:
            name: Of the parameter.
            gradient: Changed once its bucket has left.

        Raises:
            JobError: It came before in the same backward pass.
        """
        come = self._come[self._place[name]]
        if name in come:
            raise JobError(
                f"{name} got a second gradient in one backward pass, which it didn't in the first "
                "step: its first one is on its way to the other workers. Checkpointing with "
                "use_reentrant=False gives one"
            )
        come[name] = gradient
        while not self.all_left and len(self._come[self._left]) == len(self._buckets[self._left]):
            come = self._come[self._left]
            self._averager.start({n: come[n] for n in self._buckets[self._left]})
            self._left += 1
        self._averager.poll()

    def finish(self) -> None:
        """Wait until all gradients are averages. Collective."""
        self._averager.finish()
        self._left = 0
        for come in self._come:
            come.clear()
