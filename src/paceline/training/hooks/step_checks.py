"""Checks after each step whether what is promised still holds: workers alike, nothing unsaved."""

import json
from collections.abc import Callable, Mapping
from typing import final

from paceline.errors import UsageError
from paceline.gradient_sync.replica_consistency import ReplicaConsistency
from paceline.gradient_sync.unsaved_buffers import UnsavedBuffers
from paceline.training.components import Components
from paceline.training.hooks.base import StepHook
from paceline.training.run_record.numerics import NumericsRecord
from paceline.training.snapshots.train_state import TrainState


@final
class ReplicaChecks(StepHook):
    """Compares the workers' weights every few steps, and when the training is over.

    Raises a JobError where they have drifted apart.
    """

    def __init__(self, drift: ReplicaConsistency) -> None:
        """Args:
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
class ReproducibilityChecks(StepHook):
    """Checks in reproducible mode that hardware, settings and buffers stay what bits depend on."""

    def __init__(self, numerics: NumericsRecord, agree: Callable[[str], str] | None) -> None:
        """Args:
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

    def after_step(self, step: int) -> None:
        """Check settings and buffers.

        Raises:
            UsageError: The script has changed what the bits depend on.
            JobError: A buffer that no snapshot holds changes.
        """
        assert self._hidden is not None
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
