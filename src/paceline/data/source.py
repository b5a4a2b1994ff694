"""Where batches come from: the interface between the training loop and every kind of data set."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from paceline.data.batch import Batch
from paceline.data.order import EpochPlan


@runtime_checkable
class Labelled(Protocol):
    """A data set that knows its classes."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by class number."""


class BatchSource(ABC):
    """Makes batches on one worker's device.

    No method communicates with other workers, but those of a stream.
    """

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Size of the data set; the same on every worker."""

    @abstractmethod
    def train_batches(self, plan: EpochPlan) -> Iterator[Batch]:
        """Give one worker's batches of one epoch, augmented, in the epoch's global order.

        Called once an epoch, or at any step of it after a resume (`plan.first_step`); gives exactly
        one batch for every step that is left. Only the newest iterator of a source is used.
        """

    @abstractmethod
    def eval_batches(self, part: int, parts: int, batch_size: int) -> Iterator[Batch]:
        """Give one worker's contiguous share of all samples, in their own order, not augmented.

        Over all parts every sample comes exactly once. The last batch may be short; a part without
        samples gives no batch, so that the parts may differ in their number of batches.
        """

    @abstractmethod
    def describe(self) -> str:
        """Say in one line what the data is and how it is read, for the user."""

    @abstractmethod
    def close(self) -> None:
        """End reader processes, if any. Called once when the training is over; safe to repeat."""
