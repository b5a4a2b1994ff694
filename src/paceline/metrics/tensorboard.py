"""The same figures as `metrics.csv`, for TensorBoard."""

from importlib.util import find_spec
from pathlib import Path
from typing import final

from paceline.errors import UsageError
from paceline.results.metrics_table import COLUMNS, EpochRow

_TAGS = {
    name: f"{'val' if name.startswith('val_') else 'train'}/{name.removeprefix('val_')}"
    for name in COLUMNS
    if name not in ("epoch", "step", "time_s")
}


def require_tensorboard() -> None:
    """Check that the extra is installed.

    Raises:
        UsageError: It isn't; the message names the extra.
    """
    if find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs the extra: pip install 'paceline[tensorboard]'")


@final
class TensorBoardLog:
    """Writes one event file per start of the training, on rank 0 alone."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open the log; points at or after `first_step` that an earlier start wrote are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)

    def add(self, row: EpochRow) -> None:
        """Record one epoch at its global step."""
        for name, tag in _TAGS.items():
            value = getattr(row, name)
            if value is not None:
                self._writer.add_scalar(tag, value, row.step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
