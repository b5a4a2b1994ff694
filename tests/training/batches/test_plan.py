import pytest

from paceline.data.options import DataOptions
from paceline.distributed.work_division import Division
from paceline.errors import UsageError
from paceline.training.batches.plan import describe_unlike_shares, make_plan


def test_a_batch_is_shared_evenly_and_the_last_one_kept() -> None:
    plan = make_plan(DataOptions(global_batch=10), Division.of(None, 3), 25)
    assert plan.batch_per_worker == (4, 3, 3)
    assert plan.steps_per_epoch == 3
    dropped = make_plan(DataOptions(global_batch=10, drop_last=True), Division.of(None, 3), 25)
    assert dropped.steps_per_epoch == 2


@pytest.mark.parametrize(
    ("most", "micro_batches", "micro_batch"), [(None, 1, 8), (8, 1, 8), (7, 2, 4), (3, 3, 3)]
)
def test_micro_batches_follow_from_what_fits(
    most: int | None, micro_batches: int, micro_batch: int
) -> None:
    plan = make_plan(
        DataOptions(global_batch=15, max_batch_per_worker=most), Division.of(None, 2), 100
    )
    assert (plan.micro_batches, plan.micro_batch) == (micro_batches, micro_batch)


@pytest.mark.parametrize(
    ("options", "world_size", "samples", "message"),
    [
        (DataOptions(global_batch=2), 3, 100, "3 workers are more than the 2 samples"),
        (DataOptions(global_batch=8, batch_per_worker=3), 2, 100, "disagree"),
        (DataOptions(global_batch=8, drop_last=True), 1, 5, "no step"),
        (DataOptions(global_batch=8), 1, 0, "no step"),
    ],
)
def test_what_cant_be_cut(
    options: DataOptions, world_size: int, samples: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(options, Division.of(None, world_size), samples)


@pytest.mark.parametrize(
    ("workers", "batches", "told"),
    [
        (2, (8, 12), None),
        (3, (8, 12), "shared by 3 workers as 3 + 3 + 2 and as 4 + 4 + 4"),
        (3, (8, 8), None),
        (3, (8, 16), "as 3 + 3 + 2 and as 6 + 5 + 5"),
        (3, (8,), None),
    ],
)
def test_loaders_whose_batches_are_shared_unalike(
    workers: int, batches: tuple[int, ...], told: str | None
) -> None:
    division = Division.of(None, workers)
    plans = [make_plan(DataOptions(global_batch=batch), division, 100) for batch in batches]
    found = describe_unlike_shares(plans)
    assert (found is None) == (told is None)
    assert (told or "") in (found or "")
