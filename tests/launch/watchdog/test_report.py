from dataclasses import replace

from paceline.launch.errors.failures import WorkerFailure, one_line, root_cause
from paceline.launch.watchdog.hang_detector import Hang
from paceline.launch.watchdog.report import all_stacks, failures_of, render
from tests.launch.watchdog.states import IN_STEP, changed

_HANG = Hang(missing=(1,), quiet_s=31.0, usual_s=0.1, reason="behind the others")
_STATES = [
    IN_STEP,
    changed(IN_STEP, rank=1, host="node1", collectives=79, collective="", operation="data"),
    changed(IN_STEP, rank=2, process="stopped"),
]
_WAITS = 'Thread 0x0a (most recent call first):\n  File "/me/a.py", line 4 in wait'
_READS = 'Thread 0x0a (most recent call first):\n  File "/me/b.py", line 9 in read'


def test_a_report_names_who_is_missing_and_where_the_others_wait() -> None:
    text = render(_HANG, _STATES, {0: _WAITS, 1: _READS})
    assert "no progress for 31 s (the usual step takes 0.1 s)" in text
    assert (
        "Missing is rank 1 on node1 (process 100): step 40, in data, after collective 79, behind "
        f"the others, at /me/b.py:9 in read\n{_READS}\n"
    ) in text
    waiting = (
        "  rank 0 on node0 (process 100): step 40, in collective 80 (gradients), at /me/a.py:4"
    )
    assert waiting in text
    assert _WAITS not in text
    assert "--hang-after-s" in text
    whole = all_stacks(_STATES, {0: _WAITS, 1: _READS})
    assert _WAITS in whole
    assert "(no stack: its process is stopped and can't answer)" in whole


def test_the_record_of_a_hang() -> None:
    (failure,) = failures_of(_HANG, _STATES, {1: _READS})
    assert (failure.rank, failure.host, failure.step) == (1, "node1", 40)
    assert failure.kind == "infrastructure"
    assert failure.is_hang
    assert WorkerFailure.from_json(failure.to_json()) == failure
    assert one_line(failure) == (
        "rank 1 (node1, step 40, in data): the training hangs: this worker is behind the others, "
        "for 31 s, after collective 79"
    )
    lost = replace(failure, rank=0, error_type="DistBackendError", message="reset", is_hang=False)
    assert root_cause([lost, failure])[0].is_hang


def test_where_nobody_is_missing_the_first_worker_stands_for_all() -> None:
    hang = replace(_HANG, missing=(), reason="all wait for their GPUs")
    assert [failure.rank for failure in failures_of(hang, _STATES, {})] == [0]
    assert "All wait for their GPUs:\n  rank 0" in render(hang, _STATES, {})
