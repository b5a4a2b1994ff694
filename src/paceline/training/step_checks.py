"""Looks after each step whether what is promised still holds: workers alike, nothing hidden."""

from typing import final

from paceline.errors import UsageError
from paceline.gradient_sync.replica_consistency import DriftGuard
from paceline.gradient_sync.unsaved_buffers import HiddenBuffers
from paceline.training.components import Parts
from paceline.training.numerics import NumericsRecord


@final
class Guard:
    """What is looked at between steps; in reproducible mode more than otherwise."""

    def __init__(self, drift: DriftGuard, parts: Parts, numerics: NumericsRecord | None) -> None:
        """Args:
        drift: Compares the workers.
        parts: The models; complete when the training begins.
        numerics: What the bits depend on, in reproducible mode.
        """
        self._drift = drift
        self._parts = parts
        self._numerics = numerics
        self._hidden: HiddenBuffers | None = None

    def look(self, step: int) -> None:
        """Look after a step, and once before the first with step 0. Collective where due.

        Raises:
            JobError: The workers have drifted apart, or a buffer that no snapshot holds changes.
            UsageError: The script has changed what the bits depend on.
        """
        if self._numerics is not None:
            self._check_shards(self._numerics)
        self._drift.look(step)

    def look_at_the_end(self, step: int) -> None:
        """Compare the workers once more, whatever is due. Collective; raises as `look`."""
        self._drift.compare(step)

    def _check_shards(self, numerics: NumericsRecord) -> None:
        changed = numerics.changed()
        if changed:
            raise UsageError(
                f"the script has changed what the bits depend on: {'; '.join(changed)}. With "
                "--shards leave it as it was when the session began; the number of threads is "
                "given by --threads"
            )
        if self._hidden is None:
            self._hidden = HiddenBuffers(self._parts.models)
        else:
            self._hidden.check()
