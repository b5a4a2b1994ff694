import pytest

from paceline.checkpoint.options import SnapshotOptions
from paceline.errors import UsageError


def test_by_default_only_epochs_count() -> None:
    options = SnapshotOptions()
    assert options.snapshot_every_steps is None
    assert options.every_s is None
    assert options.keep_last == 3


def test_a_duration_is_read_in_seconds() -> None:
    assert SnapshotOptions(snapshot_every="1h30m").every_s == 5400


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"snapshot_every_steps": 0}, "--snapshot-every-steps is 0"),
        ({"snapshot_every": "soon"}, "--snapshot-every is 'soon', not a duration"),
        ({"keep_last": 1}, "at least 2"),
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SnapshotOptions(**given)  # type: ignore[arg-type]  # wrong values are the point
