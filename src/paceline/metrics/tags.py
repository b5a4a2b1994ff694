"""Names of metrics in TensorBoard and trackers."""

from paceline.results.metrics_table import COLUMNS, STEPS

POSITION = ("epoch", "step", "time_s", "samples")
"""Columns that say where a row stands."""


def tag_of(column: str) -> str:
    """Name the tag of a figure of the script's own, a column of `metrics.csv`."""
    return f"val/{column.removeprefix('val_')}" if column.startswith("val_") else column


def _tag(column: str) -> str:
    return tag_of(column) if column.startswith("val_") else f"train/{column.removeprefix('train_')}"


STEP_TAGS = {name: _tag(name) for name in STEPS.columns if name not in POSITION}
"""By column of `steps.csv`."""
EPOCH_TAGS = {
    # What steps have points of already has another tag for the mean of an epoch.
    name: f"epoch/{name}" if name in STEP_TAGS else _tag(name)
    for name in COLUMNS
    if name not in POSITION
}
"""By column of `metrics.csv`."""
