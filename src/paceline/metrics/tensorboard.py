"""The figures of `steps.csv` and `metrics.csv`, for TensorBoard."""

from importlib.util import find_spec
from pathlib import Path
from typing import final

from paceline.errors import UsageError
from paceline.metrics.tags import EPOCH_TAGS, STEP_TAGS, tag_of
from paceline.results.metrics_table import EpochRow, StepRow


def require_tensorboard() -> None:
    """Check that the extra is installed.

    Raises:
        UsageError: It isn't; the message names the extra.
    """
    if find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs the extra: pip install 'paceline[tensorboard]'")


@final
class TensorBoardLog:
    """Writes one event file per start of the training, on rank 0 alone; by any thread."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open the log; points after `first_step` that an earlier start wrote are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1, flush_secs=5)

    def add(self, row: EpochRow | StepRow) -> None:
        """Record a row at its global step; of an epoch with the script's own figures."""
        tags = STEP_TAGS if isinstance(row, StepRow) else EPOCH_TAGS
        for name, tag in tags.items():
            value = getattr(row, name)
            if value is not None:
                self._writer.add_scalar(tag, value, row.step)
        if isinstance(row, EpochRow):
            for name, value in row.extra.items():
                self._writer.add_scalar(tag_of(name), value, row.step)
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
