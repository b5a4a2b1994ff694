import pytest

from paceline.data.options import DataOptions, choose_global_batch, count_micro_batches
from paceline.errors import UsageError
from paceline.options.fields import flag, option_fields


def test_fields_have_defaults_and_help() -> None:
    names = [field.name for field in option_fields(DataOptions, "Data")]
    assert names == [
        "global_batch",
        "batch_per_worker",
        "max_batch_per_worker",
        "shards",
        "drop_last",
        "loader_workers",
    ]


@pytest.mark.parametrize("name", ["global_batch", "batch_per_worker", "max_batch_per_worker"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{flag(name)} is {value}"):
        DataOptions(**{name: value})  # type: ignore[arg-type]


def test_loader_workers_must_not_be_negative() -> None:
    with pytest.raises(UsageError, match="--loader-workers is -1"):
        DataOptions(loader_workers=-1)


@pytest.mark.parametrize(
    ("options", "world_size", "expected"),
    [
        (DataOptions(), 2, 64),
        (DataOptions(global_batch=10), 3, 10),
        (DataOptions(batch_per_worker=7), 3, 21),
        (DataOptions(batch_per_worker=7, global_batch=21), 3, 21),
        (DataOptions(global_batch=3), 3, 3),
    ],
)
def test_choose_global_batch(options: DataOptions, world_size: int, expected: int) -> None:
    assert choose_global_batch(options, world_size) == expected


def test_disagreeing_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="--global-batch 64 and --batch-per-worker 32 disagree"):
        choose_global_batch(DataOptions(global_batch=64, batch_per_worker=32), 3)


def test_more_workers_than_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 3 workers, or a global batch of at least 4"):
        choose_global_batch(DataOptions(global_batch=3), 4)


@pytest.mark.parametrize(("share", "most", "pieces"), [(32, None, 1), (32, 32, 1), (33, 32, 2)])
def test_count_micro_batches(share: int, most: int | None, pieces: int) -> None:
    assert count_micro_batches(share, most) == pieces
