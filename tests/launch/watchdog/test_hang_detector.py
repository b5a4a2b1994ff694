from collections.abc import Sequence

import pytest

from paceline.launch.heartbeat import DEVICE_WAIT
from paceline.launch.watchdog.hang_detector import HangLimits, detect_hang
from paceline.launch.watchdog.worker_state import WorkerState
from tests.launch.watchdog.states import IN_STEP, changed

LIMITS = HangLimits()
# What a host looks like that waits for its GPU: it spins, and is in no collective of its own.
ON_GPU = {"operation": DEVICE_WAIT, "busy": 1.0, "collective": ""}


def three(**second: object) -> list[WorkerState]:
    """Three workers; the one in the middle is different."""
    states = [changed(IN_STEP, rank=rank) for rank in range(3)]
    return [states[0], changed(states[1], **second), states[2]]


BEHIND = three(collectives=79, collective="")
STOPPED = three(process="stopped")
ALONE_BUSY = three(busy=1.0)
ELSEWHERE = three(collective="all-gather", step=39)
READING = three(collectives=79, collective="", operation="data", step=39)


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (BEHIND, "behind the others"),
        (READING, "behind the others"),
        (STOPPED, "stopped by a signal"),
        (ALONE_BUSY, "computing"),
        (ELSEWHERE, "in another collective"),
    ],
)
def test_who_is_missing(states: Sequence[WorkerState], reason: str) -> None:
    hang = detect_hang(states, LIMITS)
    assert hang is not None
    assert hang.missing == (1,)
    assert reason in hang.reason
    assert (hang.quiet_s, hang.usual_s) == (31.0, 0.1)


def on_gpus(**second: object) -> list[WorkerState]:
    """Three workers whose hosts wait for their GPUs; the one in the middle is different."""
    states = [changed(IN_STEP, rank=rank, **ON_GPU) for rank in range(3)]
    return [states[0], changed(states[1], **second), states[2]]


@pytest.mark.parametrize(
    ("states", "missing", "reason"),
    [
        (on_gpus(), (), "a kernel or a collective on them"),
        (on_gpus()[:1], (), "a kernel or a collective on them"),
        (on_gpus(collectives=79, operation="step"), (1,), "behind the others"),
        (on_gpus(operation="step"), (1,), "computing without an end"),
        (three(**ON_GPU | {"collectives": 79}), (1,), "on which something doesn't end"),
    ],
)
def test_a_host_that_waits_for_its_gpu_is_not_busy(
    states: Sequence[WorkerState], missing: tuple[int, ...], reason: str
) -> None:
    hang = detect_hang(states, LIMITS)  # after 31 s: the limit of a step
    assert hang is not None
    assert (hang.missing, hang.quiet_s) == (missing, 31.0)
    assert reason in hang.reason
    early = [changed(state, steps=0, age_s=269.0) for state in states]
    assert detect_hang(early, LIMITS) is None
    assert detect_hang([changed(state, age_s=271.0) for state in early], LIMITS) is not None


def test_of_two_in_different_collectives_the_further_one_has_left_one_out() -> None:
    ahead = changed(IN_STEP, rank=0, step=41)
    hang = detect_hang([ahead, changed(IN_STEP, rank=1, collective="all-gather")], LIMITS)
    assert hang is not None
    assert hang.missing == (0,)
    hang = detect_hang([IN_STEP, changed(IN_STEP, rank=1, collective="all-gather")], LIMITS)
    assert hang is not None
    assert hang.missing == (0, 1)  # nothing shows which of them is wrong


def test_nobody_is_missing_where_all_wait_for_each_other() -> None:
    hang = detect_hang(three(), LIMITS)
    assert hang is not None
    assert hang.missing == ()
    assert "connection" in hang.reason


@pytest.mark.parametrize(
    ("states", "limit_s"),
    [
        (BEHIND, 30.0),
        ([changed(state, median_step_s=9.0) for state in BEHIND], 90.0),  # ten usual steps
        ([changed(state, busy=1.0, collective="") for state in three()], 300.0),  # all compute
        ([changed(IN_STEP, collective="")], 300.0),  # one worker waits for nobody
        ([changed(state, steps=0) for state in BEHIND], 270.0),  # before the first step
        (ELSEWHERE, 10.0),  # in different collectives, which can't end
        (three(operation="evaluate", collective="all-gather"), 10.0),
        (three(operation="evaluate", collectives=79, collective=""), 270.0),
        (three(operation="snapshot", collectives=79, collective=""), 270.0),
        (three(operation="script", collectives=79, collective=""), 270.0),
    ],
)
def test_how_long_is_too_long(states: Sequence[WorkerState], limit_s: float) -> None:
    def after(seconds: float) -> Sequence[WorkerState]:
        return [changed(state, step_age_s=seconds, age_s=seconds) for state in states]

    assert detect_hang(after(limit_s - 1), LIMITS) is None
    assert detect_hang(after(limit_s + 1), LIMITS) is not None


def test_where_nobody_waits_a_long_evaluation_or_first_step_may_last_for_ever() -> None:
    for operation, steps in (("evaluate", 39), ("step", 0), ("restore", 0)):
        states = [
            changed(s, collective="", operation=operation, steps=steps, age_s=1e6, step_age_s=1e6)
            for s in three()
        ]
        assert detect_hang(states, LIMITS) is None


def test_a_step_that_one_worker_has_finished_lately_is_progress() -> None:
    assert detect_hang(three(step_age_s=2.0), LIMITS) is None


@pytest.mark.parametrize("process", ["gone", "traced"])
def test_a_worker_that_is_gone_or_debugged_is_no_hang(process: str) -> None:
    assert detect_hang(three(process=process, collectives=79), LIMITS) is None


def test_unseen_workers_double_the_limit() -> None:
    assert detect_hang(BEHIND, LIMITS, unseen=1) is None
    older = [changed(state, step_age_s=61.0) for state in BEHIND]
    assert detect_hang(older, LIMITS, unseen=1) is not None


def test_a_hang_is_found_before_those_that_wait_give_up() -> None:
    states = [changed(state, step_age_s=19.0, median_step_s=9.0) for state in BEHIND]
    assert detect_hang(states, HangLimits(timeout_s=20.0)) is not None
    assert detect_hang(states, HangLimits(timeout_s=40.0)) is None


def test_the_limits_are_options() -> None:
    assert detect_hang(BEHIND, HangLimits(least_s=32.0)) is None
    states = [changed(state, step_age_s=2.0) for state in BEHIND]
    assert detect_hang(states, HangLimits(least_s=1.0)) is not None
    assert detect_hang([], LIMITS) is None
