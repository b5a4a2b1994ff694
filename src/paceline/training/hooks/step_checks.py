"""Checks after steps and epochs: equal weights on all workers, equal streams, unsaved state."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import final

import torch

from paceline.data.loading.stream import StreamRecord, StreamSource
from paceline.errors import JobError, UsageError
from paceline.gradient_sync.replica_consistency import ReplicaConsistency
from paceline.gradient_sync.unsaved_buffers import UnsavedBuffers
from paceline.metrics.console import Communication
from paceline.results.metrics_table import EpochRow
from paceline.training.batches.loader import EvalLoader, Loader
from paceline.training.batches.sources import SUBSET_ADVICE
from paceline.training.components import UNKNOWN_SCHEDULER, Components
from paceline.training.context import TrainingContext
from paceline.training.hooks.base import StepHook
from paceline.training.run_record.numerics import NumericsRecord
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement


@final
class LoopChecks(StepHook):
    """Checks what scripts do around the session: loops left early, schedulers of their own."""

    def __init__(self, context: TrainingContext, warn: Callable[[str], None]) -> None:
        """Create the loop checks.

        Args:
            context: Of the training.
            warn: Called with what the user has to know.
        """
        self._context = context
        self._warn = warn
        self._resumed_at = 0
        self._has_named_accuracy = False

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Note where the training goes on from, and look for what no snapshot has."""
        self._resumed_at = position.step
        if components.has_unknown_scheduler():
            self._warn(UNKNOWN_SCHEDULER)

    def after_evaluation(self, metrics: Mapping[str, float], samples: int) -> None:
        """Look once whether an accuracy is a share: targets and the best snapshot go by it."""
        accuracy = metrics.get("accuracy", 0.0)
        if (accuracy < 0.0 or accuracy > 1.0) and not self._has_named_accuracy:
            self._has_named_accuracy = True
            self._warn(
                f"s.evaluate has an accuracy of {accuracy:.4g}, which should lie between 0 and 1: "
                "give its mean over the batch, or one element for each sample, no sum or percentage"
            )

    def end_epoch(self, row: EpochRow) -> None:
        """Compare who has left, before anything else that all do together. Collective.

        Raises:
            JobError: Some workers have left their loop, and others go on.
        """
        group, script = self._context.group, self._context.script
        rows = group.gather_rows(torch.tensor([script.has_left]))[:, 0].tolist()
        left, stayed = (
            [r for r, has in enumerate(rows) if has is which] for which in (True, False)
        )
        if left and stayed and self._context.progress.can_continue:
            hosts = group.hosts()
            raise JobError(
                f"rank {left[0]} on {hosts[left[0]]} has left its loop after epoch {row.epoch}, "
                f"and rank {stayed[0]} on {hosts[stayed[0]]} goes on: each has decided by a figure "
                "of its own. Decide by what is the same on all workers: by what s.evaluate(...) "
                "returns, or by sums, s.sum(...)"
            )
        if left and not stayed:
            state = self._context.progress.state
            state.ended = state.ended or "script"
        # What the script counts or compares itself has begun anew when it was resumed.
        others = self._context.components.others.values()
        keeps = [each for each in others if not isinstance(each, Loader)]
        if left and self._resumed_at and not keeps and not script.asks_for_steps:
            self._warn(
                "the script has left its loop by itself, in a training that was resumed. If that "
                "follows from a variable of its own (a count of steps, the best figure), this "
                "began anew then: count by s.steps_done, and keep others by s.keep(best=...)"
            )


@final
class StreamChecks(StepHook):
    """Checks that streams give the same samples after resuming as they gave before."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """Create the stream checks.

        Args:
            warn: Called with what the user has to know.
        """
        self._warn = warn
        self._sources: list[StreamSource] = []

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Find the loaders that read streams, and hand them their records from the snapshot."""
        loaders = [each for each in components.loaders if isinstance(each, Loader)]
        sources = [loader.source for loader in loaders if loader.served.is_stream]
        self._sources = [source for source in sources if isinstance(source, StreamSource)]
        records = saved.get("streams", [])
        assert isinstance(records, list)  # as `state_dict` has it
        for source, record in zip(self._sources, records, strict=False):
            source.resume(StreamRecord(**record), self._warn)

    def state_dict(self) -> Mapping[str, object]:
        """Give what the streams have given, summed up."""
        records = [asdict(source.record) for source in self._sources]
        return {"streams": records} if records else {}


@final
class SubsetChecks(StepHook):
    """Compares, once resumed, which samples torch's `Subset`s pick with those trained on before."""

    def __init__(self) -> None:
        self._loaders: Sequence[Loader | EvalLoader] = ()

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Compare those of the loaders that there are.

        Raises:
            JobError: As many samples as before are others; alike on all workers.
        """
        self._loaders = components.loaders
        before = saved.get("subsets", [])
        assert isinstance(before, list)  # as `state_dict` has it
        picked = self._picked()
        trained = zip(self._loaders, picked, strict=True)
        if not any(isinstance(loader, Loader) and subset for loader, subset in trained):
            return  # all is trained on, whatever it is evaluated on
        # Of another size they are others on purpose: nothing that is drawn anew changes it.
        for then, now in zip(before, picked, strict=False):
            if then != now and then.partition(" ")[0] == now.partition(" ")[0]:
                raise JobError(
                    f"the training was resumed with other samples in a Subset ({now}) than it "
                    f"began with ({then}): it might train on what it has been evaluated "
                    f"on. {SUBSET_ADVICE}"
                )

    def state_dict(self) -> Mapping[str, object]:
        """Give which samples the subsets pick, as checksums."""
        picked = self._picked()
        return {"subsets": picked} if any(picked) else {}

    def _picked(self) -> list[str]:
        return [loader.served.picked_samples for loader in self._loaders]


@final
class ReplicaChecks(StepHook):
    """Compares the workers' weights every few steps, and when the training is over.

    Raises a JobError where they have drifted apart.
    """

    def __init__(self, drift: ReplicaConsistency) -> None:
        """Create the replica checks.

        Args:
            drift: Compares the workers.
        """
        self._drift = drift

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Compare the weights that the training begins with."""
        self._drift.check(0)

    def after_step(self, step: int) -> None:
        """Compare where it is due."""
        self._drift.check(step)

    def end_training(self, step: int) -> None:
        """Compare once more, whatever is due."""
        self._drift.compare(step)


@final
class RareReplicaChecks(StepHook):
    """Compares the workers' weights seldom, without `--check-every`, at no cost in steps.

    Learning rates after each epoch: they are the script's, and a difference is an error. Weights
    after the first epoch and at the end: a difference is told, since it may be that of two kinds of
    GPUs.
    """

    def __init__(self, drift: ReplicaConsistency, warn: Callable[[str], None]) -> None:
        """Create the rare replica checks.

        Args:
            drift: Compares the workers.
            warn: Called with what the user has to know.
        """
        self._drift = drift
        self._warn = warn
        self._has_compared = self._has_warned = False

    def end_epoch(self, row: EpochRow) -> None:
        """Compare rates, and after the first epoch weights. Collective.

        Raises:
            JobError: Rates differ.
        """
        self._drift.compare_rates(row.step)
        if not self._has_compared:
            self._compare(row.step)

    def end_training(self, step: int) -> None:
        """Compare weights once more, unless a difference has been reported."""
        if not self._has_warned:
            self._compare(step)

    def _compare(self, step: int) -> None:
        self._has_compared = True
        try:
            self._drift.compare(step)
        except JobError as error:
            self._has_warned = True
            self._warn(str(error))


@final
class ReproducibilityChecks(StepHook):
    """With `--shards`: checks that what results depend on (hardware, settings, buffers) stays."""

    def __init__(self, numerics: NumericsRecord, agree: Callable[[str], str] | None) -> None:
        """Create the reproducibility checks.

        Args:
            numerics: What the bits depend on.
            agree: Gives rank 0's text, where several workers write snapshots: these have to be the
                same, though the workers' hardware may not be. Collective.
        """
        self._numerics = numerics
        self._agree = agree
        self._agreed: Mapping[str, object] | None = None
        self._hidden: UnsavedBuffers | None = None

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Compare with what the snapshot was computed on. Collective."""
        if self._agree is not None:
            self._agreed = json.loads(self._agree(json.dumps(self._numerics.describe())))
        self._numerics.compare(saved.get("numerics"))
        self._check_settings()
        self._hidden = UnsavedBuffers(components.models)

    def after_exchange(
        self, agreed: Agreement, steps: int, spent: Communication | None, top: int | None
    ) -> None:
        """Check settings and buffers: before each snapshot. In every step it would take 30 us.

        Raises:
            UsageError: The script has changed what the bits depend on.
            JobError: A buffer that no snapshot holds changes.
        """
        assert self._hidden is not None
        if steps:  # what comes behind the last one changes nothing
            self._check_settings()
            self._hidden.check()

    def state_dict(self) -> Mapping[str, object]:
        """Give what the bits depend on."""
        return {"numerics": self._agreed or self._numerics.describe()}

    def _check_settings(self) -> None:
        changed = self._numerics.changed()
        if changed:
            raise UsageError(
                f"the script has changed what the bits depend on: {'; '.join(changed)}. With "
                "--shards leave it as it was when the session began; the number of threads is "
                "given by --threads"
            )
