from collections.abc import Sequence

import pytest

from paceline.training.profiling.step_timeline import StepEvent, StepSample, share_out

Marks = Sequence[tuple[StepEvent, float]]

WHOLE: Marks = [
    ("asked", 0.0),
    ("batch", 1.0),
    ("backward", 3.0),
    ("computed", 7.0),
    ("gradients", 15.0),
    ("updated", 31.0),
    ("closed", 63.0),
]


def test_each_time_has_its_place() -> None:
    sample = share_out(WHOLE)
    assert sample == StepSample(
        data_s=1.0, forward_s=2.0, backward_s=4.0, wait_s=8.0, optimizer_s=16.0, other_s=32.0
    )
    assert sample.total_s == 63.0
    assert sample.compute_s == 1.0 + 2.0 + 4.0 + 16.0


def test_a_worker_alone_waits_for_nobody() -> None:
    sample = share_out([mark for mark in WHOLE if mark[0] != "computed"])
    assert (sample.backward_s, sample.wait_s) == (4.0 + 8.0, 0.0)


def test_pieces_of_a_batch_are_computing() -> None:
    sample = share_out(
        [
            ("asked", 0.0),
            ("batch", 0.0),
            ("backward", 1.0),
            ("piece", 3.0),
            ("backward", 4.0),
            ("computed", 6.0),
            ("gradients", 6.5),
            ("updated", 7.0),
            ("closed", 7.0),
        ]
    )
    assert sample == StepSample(forward_s=2.0, backward_s=4.0, wait_s=0.5, optimizer_s=0.5)


def test_two_models_that_are_trained_by_turns_add_up() -> None:
    sample = share_out(
        [
            ("asked", 0.0),
            ("batch", 1.0),
            ("backward", 2.0),
            ("computed", 4.0),
            ("gradients", 5.0),
            ("updated", 6.0),
            ("backward", 7.0),
            ("computed", 9.0),
            ("gradients", 10.0),
            ("updated", 11.0),
            ("closed", 11.5),
        ]
    )
    assert sample == StepSample(
        data_s=1.0, forward_s=2.0, backward_s=4.0, wait_s=2.0, optimizer_s=2.0, other_s=0.5
    )


def test_what_a_method_computes_of_gradients_is_no_wait() -> None:
    own: Marks = [
        ("sent", 8.0),
        ("came", 10.0),
        ("sent", 14.0),
        ("came", 22.0),
        ("gradients", 38.0),
        ("updated", 39.0),
    ]
    sample = share_out([*WHOLE[:4], *own])
    assert sample.wait_s == 2.0 + 8.0
    assert sample.other_s == 1.0 + 4.0 + 16.0


@pytest.mark.parametrize("marks", [WHOLE, WHOLE[:3], WHOLE[:1], []])
def test_nothing_is_lost(marks: Marks) -> None:
    assert share_out(marks).total_s == (marks[-1][1] if marks else 0.0)
