"""Which starts of a training count for where its bits come from."""

import pytest

from paceline.training.run_record.numerics import is_mixed

Start = tuple[int, str]


@pytest.mark.parametrize(
    ("starts", "step", "mixed"),
    [
        ([], 0, False),
        ([(0, "a")], 10, False),
        ([(0, "a"), (5, "a")], 10, False),
        ([(0, "a"), (5, "b")], 10, True),
        ([(0, "a"), (5, "b"), (7, "a")], 10, True),
        ([(0, "a"), (5, "b"), (7, "b")], 10, True),
        ([(0, "a"), (5, "b"), (5, "a")], 10, False),  # what b computed was lost
        ([(0, "a"), (0, "b")], 10, False),
        ([(0, "a"), (10, "b")], 10, False),  # b had nothing to do
        ([(0, "ab")], 10, True),  # workers of two kinds
    ],
    ids=str,
)
def test_steps_that_count_decide(starts: list[Start], step: int, mixed: bool) -> None:
    history = [
        {"from_step": begin, "numerics": [{"cpu": kind} for kind in kinds]}
        for begin, kinds in starts
    ]
    assert is_mixed(history, step) is mixed
