import io
import sys
from dataclasses import replace

import pytest

from paceline.launch.watchdog.stragglers import (
    Speeds,
    Straggler,
    find_stragglers,
)
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.options.text import above_progress
from tests.launch.watchdog.states import FAST, IN_STEP, changed


def seen(rank: int, looks: int, *, waiting: float, data: float) -> WorkerState:
    """A worker after so many looks, ten steps of 0.1 s each."""
    steps = 10 * looks
    return changed(
        IN_STEP,
        rank=rank,
        steps=steps,
        total_s=0.1 * steps,
        waiting_s=waiting * steps,
        data_s=data * steps,
    )


def test_speeds_are_those_of_the_last_looks() -> None:
    speeds = Speeds()
    for looks in range(1, 51):
        states = [
            seen(0, looks, waiting=0.07, data=0.01),
            seen(1, looks, waiting=0.0, data=0.06),
        ]
        found = speeds.update(states)
        told = speeds.stragglers(found)
        if looks == 30:  # ten until the window is full, and twenty in a row
            assert [straggler.speed.rank for straggler in told] == [1]
            assert told[0].line().startswith("rank 1 on node0 waits long for its data")
        else:
            assert told == []  # nothing is known yet, or it was told less than a minute ago
    assert [speed.rank for speed in found] == [1, 0]
    slow = found[0]
    assert slow.step_s == pytest.approx(0.1)
    assert slow.compute_s == pytest.approx(0.04)
    assert slow.data_s == pytest.approx(0.06)
    assert found[1].own_s == pytest.approx(0.03)


def test_a_straggler_is_told_of_again_after_a_minute() -> None:
    speeds, told = Speeds(), []
    for looks in range(1, 160):
        states = [seen(0, looks, waiting=0.07, data=0.0), seen(1, looks, waiting=0.0, data=0.0)]
        if speeds.stragglers(speeds.update(states)):
            told.append(looks)
    assert told == [30, 90, 150]


@pytest.mark.parametrize("turn", [3, 12, 19])
def test_nobody_is_named_where_now_this_worker_is_slow_and_now_that(turn: int) -> None:
    speeds, slow = Speeds(), {0, 1}
    waited = {0: 0.0, 1: 0.0}
    seen_slow = set()
    for looks in range(1, 200):
        now = looks // turn % 2
        waited[1 - now] += 10 * 0.07  # the other one waits for it, ten steps long
        states = [changed(seen(r, looks, waiting=0, data=0), waiting_s=waited[r]) for r in slow]
        found = speeds.update(states)
        assert speeds.stragglers(found) == []
        if looks > 11:
            seen_slow |= {each.speed.rank for each in find_stragglers(found)}
    assert seen_slow == (slow if turn > 3 else set())  # each look by itself would have blamed them


def test_parts_never_exceed_a_step() -> None:
    speeds = Speeds()
    speeds.update([seen(0, 1, waiting=0.0, data=0.0)])
    (speed,) = speeds.update([changed(seen(0, 2, waiting=0.0, data=0.0), waiting_s=90.0)])
    assert speed.waiting_s == pytest.approx(0.1)
    assert speed.compute_s == 0.0


@pytest.mark.parametrize(
    ("compute_s", "data_s", "causes"),
    [
        (0.09, 0.01, ["compute"]),
        (0.04, 0.06, ["data"]),
        (0.05, 0.01, []),  # hardly slower
    ],
)
def test_stragglers(compute_s: float, data_s: float, causes: list[str]) -> None:
    slow = replace(FAST, rank=2, compute_s=compute_s, data_s=data_s, waiting_s=0.0)
    found = find_stragglers([slow, FAST, replace(FAST, rank=1)])
    assert [straggler.cause for straggler in found] == causes
    assert find_stragglers([slow]) == []


def test_the_warning_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Straggler(replace(FAST, host="a-host-with-a-name"), 0.02, "compute").line()
    report = f"{line}\n  File {'a' * 90}.py, line 3, in forward"
    assert above_progress(report) == report  # in a pipe or a log
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "80")
    *shown, frame = above_progress(report).removeprefix("\r\x1b[2K").split("\n")
    assert len(shown) == 3
    assert all(len(each) <= 80 for each in shown)
    assert " ".join(each.strip() for each in shown) == line
    assert frame == report.split("\n")[1]
