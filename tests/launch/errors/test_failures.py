import json
import signal
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from paceline.launch.errors.failures import (
    WorkerExits,
    WorkerFailure,
    is_lost_peer,
    one_line,
    render,
    root_cause,
    signal_name,
    silent_failure,
    unrecorded,
)

_GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


def _failure(rank: int, **changes: object) -> WorkerFailure:
    plain = WorkerFailure(
        rank=rank,
        host="h",
        step=3,
        exit_code=65,
        signal_name=None,
        kind="job",
        error_type="ValueError",
        message="wrong",
        traceback="Traceback (most recent call last):\n  ...\nValueError: wrong\n",
        operation="backward",
        time_s=100.0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def _silent(rank: int, exit_code: int, **changes: object) -> WorkerFailure:
    known = silent_failure(
        rank,
        exit_code,
        host="h",
        step=None,
        operation="",
        out_of_memory=False,
        crash="",
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def _lost_peer(rank: int, time_s: float) -> WorkerFailure:
    return _failure(
        rank,
        kind="infrastructure",
        error_type="RuntimeError",
        message=_GLOO,
        traceback=f"Traceback\nRuntimeError: {_GLOO}",
        time_s=time_s,
    )


def test_json_round_trip() -> None:
    failure = _failure(1)
    assert WorkerFailure.from_json(json.loads(json.dumps(failure.to_json()))) == failure


@pytest.mark.parametrize("content", [None, [], {}, {"kind": "job"}, {"kind": "other"}])
def test_other_json_is_refused(content: object) -> None:
    with pytest.raises(ValueError, match="not a failure record"):
        WorkerFailure.from_json(content)


def test_the_cause_does_not_depend_on_who_was_noticed_first() -> None:
    killed = _silent(2, -signal.SIGKILL)
    disk = _failure(
        1, kind="infrastructure", error_type="OSError", message="No space left", traceback=""
    )
    ordered = (
        killed,
        _failure(3, time_s=50.0),
        _silent(5, -signal.SIGABRT),
        disk,
        _lost_peer(0, 1.0),
        _lost_peer(4, 2.0),
    )
    for shuffled in permutations(ordered):
        assert root_cause(shuffled) == ordered


def test_between_equals_the_earlier_one_is_the_cause() -> None:
    assert [f.rank for f in root_cause([_failure(0, time_s=9.0), _failure(1, time_s=8.0)])] == [
        1,
        0,
    ]
    assert [f.rank for f in root_cause([_failure(1), _failure(0)])] == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        _GLOO,
        "Connection reset by peer",
        "Timed out waiting 8000ms for recv operation to complete",
        "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error",
        "writev [127.0.0.1]:1: Broken pipe",
    ],
)
def test_lost_peers_are_known_by_their_words(text: str) -> None:
    assert is_lost_peer("RuntimeError", text)


def test_a_lost_peer_that_only_the_traceback_tells_of_comes_after_the_cause() -> None:
    """As where a library wraps the error: `raise RuntimeError(...) from error`."""
    wrapped = _failure(
        0,
        kind="infrastructure",
        error_type="RuntimeError",
        message="the step failed",
        traceback=f"Traceback\nRuntimeError: {_GLOO}\n\nThe above exception was the direct cause "
        "of the following exception:\n\nTraceback\nRuntimeError: the step failed",
        time_s=1.0,
    )
    disk = _failure(1, kind="infrastructure", error_type="OSError", message="No space", time_s=2.0)
    assert [failure.rank for failure in root_cause([wrapped, disk])] == [1, 0]
    unrecorded_text = replace(wrapped, message=_GLOO, traceback="")
    assert [failure.rank for failure in root_cause([unrecorded_text, disk])] == [1, 0]


def test_lost_peers_are_known_by_their_type() -> None:
    assert is_lost_peer("DistBackendError", "whatever")
    assert not is_lost_peer("RuntimeError", "shapes don't match: (3, 4) and (4, 3)")


def test_workers_that_said_nothing() -> None:
    ending = WorkerExits(
        exit_codes={0: -15, 1: -9, 2: 65, 3: 0, 4: None, 5: -9, 6: 3, 7: -11},
        first=1,
        stopped=frozenset({5}),
    )
    assert unrecorded(ending, {2: _failure(2)}, [3, 7]) == {1: -9, 6: 3}


def test_a_worker_that_ended_with_0_and_no_result_has_failed() -> None:
    ending = WorkerExits(exit_codes={0: 0, 1: 0, 2: 70}, first=2, stopped=frozenset())
    assert unrecorded(ending, {2: _failure(2)}, [0]) == {1: 0}
    assert _silent(1, 0).kind == "job"
    assert root_cause([_lost_peer(2, time_s=1.0), _silent(1, 0)])[0].rank == 1


def test_a_sigterm_from_outside_counts() -> None:
    ending = WorkerExits(exit_codes={0: -15, 1: -15}, first=1, stopped=frozenset())
    assert unrecorded(ending, {}, []) == {1: -15}


def test_after_a_request_to_stop_only_those_that_did_not_obey_count() -> None:
    ending = WorkerExits(
        exit_codes={0: -15, 1: -15, 2: -9}, first=1, stopped=frozenset({2}), stop_requested=True
    )
    assert unrecorded(ending, {}, []) == {2: -9}


def test_silent_failures_say_what_is_known() -> None:
    assert _silent(0, -signal.SIGSEGV).message == "killed by SIGSEGV"
    assert _silent(0, -signal.SIGSEGV).signal_name == "SIGSEGV"
    assert "exit code 3" in _silent(0, 3).message
    starved = silent_failure(
        0,
        -signal.SIGKILL,
        host="h",
        step=4,
        operation="",
        out_of_memory=True,
        crash="",
    )
    assert "out of memory" in starved.message
    assert (starved.kind, starved.step) == ("infrastructure", 4)
    unsure = silent_failure(
        0,
        -signal.SIGKILL,
        host="h",
        step=4,
        operation="",
        out_of_memory=None,
        crash="",
    )
    assert "perhaps for want of memory" in unsure.message


def test_signals_without_a_name() -> None:
    assert signal_name(15) == "SIGTERM"
    assert signal_name(99) == "signal 99"


def test_one_line_stays_one_line() -> None:
    text = one_line(_failure(2, message="first\nsecond " + "x" * 500))
    assert text == "rank 2 (h, step 3, in backward): ValueError: first"
    assert len(one_line(_failure(2, message="x" * 500))) < 300
    assert one_line(_failure(2, message="", step=None, operation="")).startswith("rank 2 (h): ")


def test_the_user_gets_one_whole_traceback_and_a_line_for_each_other() -> None:
    text = render([_failure(1), _lost_peer(0, 1.0)], Path("run/logs"))
    assert text.startswith("The training failed on rank 1 (h, step 3, in backward).")
    assert "Traceback (most recent call last):\n  ...\nValueError: wrong" in text
    assert f"\n  rank 0 (h, step 3, in backward): RuntimeError: {_GLOO}" in text
    assert text.endswith("Log of this worker: run/logs/rank-1.log")


def test_a_killed_worker_needs_no_traceback() -> None:
    text = render([_silent(1, -signal.SIGKILL)], Path("logs"))
    assert text.startswith("The training failed: rank 1 (h): killed by SIGKILL\n")
