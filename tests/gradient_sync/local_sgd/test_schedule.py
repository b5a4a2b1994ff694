"""When each part of a model leaves and arrives."""

import pytest

from paceline.gradient_sync.local_sgd.schedule import LocalPlan, LocalTerms
from paceline.gradient_sync.options import SyncOptions


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 11])
@pytest.mark.parametrize(("every", "delay"), [(1, 0), (2, 1), (5, 0), (8, 3), (8, 7)])
def test_every_part_leaves_once_in_so_many_steps_and_arrives_before_it_leaves_again(
    every: int, delay: int, parts: int
) -> None:
    plan = LocalPlan(every=every, delay=delay, parts=parts)
    left = {part: [] for part in range(parts)}  # type: dict[int, list[int]]
    came = {part: [] for part in range(parts)}  # type: dict[int, list[int]]
    for step in range(1, 4 * every + 1):
        for part in plan.leaving(step):
            left[part].append(step)
        for part in plan.arriving(step):
            came[part].append(step)
    for part in range(parts):
        assert 1 <= left[part][0] <= every
        assert {b - a for a, b in zip(left[part], left[part][1:], strict=False)} == {every}
        assert [step + delay for step in left[part]][: len(came[part])] == came[part]
    most = -(-parts // every)
    assert max(len(plan.leaving(step)) for step in range(1, every + 1)) <= most  # evenly


def test_terms_of_the_options() -> None:
    local = LocalTerms.of(SyncOptions(sync="local", sync_every=6, outer_lr=0.1))
    assert local.is_plain
    assert local.plan == LocalPlan(every=6, delay=3, parts=1)
    diloco = LocalTerms.of(SyncOptions(sync="diloco", sync_precision="int8", sync_parts=2))
    assert (diloco.outer_lr, diloco.outer_momentum) == (0.7, 0.9)
    assert not diloco.is_plain
    assert diloco.describe() == {"every": 8, "delay": 4, "parts": 2, "precision": "int8"}
