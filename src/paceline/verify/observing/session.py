"""Observes what Paceline's own session trains."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.verify.events import Backward, Drawn, Figured, PassEnded
from paceline.verify.observing.observer import Observer
from paceline.verify.tensor_sketch import all_finite, content_hashes
from paceline.verify.trial import EnoughSeenError

SESSION_LOADER = -1
"""Represents the loader that a session's steps are counted by."""


@final
@dataclass
class SessionWatch:
    """A `TrainingObserver` that reports to the observer of its worker."""

    observer: Observer
    _epoch: int = 0

    def begin(self, models: Mapping[str, nn.Module]) -> None:
        """Note the models, as all ranks have them by now."""
        self.observer.in_session = True
        for name, model in models.items():
            self.observer.record_model(model, "session", prefix=name if len(models) > 1 else "")

    def epoch(self, number: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return an epoch's batches until enough steps were seen."""
        steps, most, writer = 0, self.observer.trial.steps, self.observer.writer
        for batch in batches:
            yield batch
            # A step has one batch for each shard: the last one ends it.
            steps += batch.last
            if steps == most:
                break
        writer.write(PassEnded(SESSION_LOADER, number, steps == most))

    def batch(self, epoch: int, batch: Batch) -> None:
        """Note what is about to be trained on.

        Raises:
            EnoughSeenError: Enough epochs were seen.
        """
        if epoch >= self.observer.trial.epochs:
            raise EnoughSeenError
        self._epoch = epoch
        samples = tuple(str(int(index)) for index in batch.indices)
        drawn = Drawn(
            SESSION_LOADER,
            epoch,
            samples,
            content_hashes(batch.content, len(samples)) if samples else (),
            trains=True,
            part=batch.part,
            finite=all_finite(batch.content),
        )
        self.observer.writer.write(drawn)
        self.observer.batch_came()

    def backward(self, loss: Tensor, weight: float) -> None:
        """Note a backward pass."""
        self.observer.record_draws()
        fed = ((SESSION_LOADER, self._epoch),)
        self.observer.writer.write(Backward(float(loss.detach()), weight, fed=fed))

    def evaluated(self, metrics: Mapping[str, float], samples: int) -> None:
        """Note an evaluation's figures."""
        self.observer.writer.write(Figured(dict(metrics), samples))
