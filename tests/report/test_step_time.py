"""Bars of a profile: what they add up to, and which there are."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.report.step_time import (
    MOST_WORKERS,
    read_profile,
    time_pictures,
    time_table,
    workers_picture,
)
from paceline.results.profile import EpochCosts, StepProfile, WorkerTime

GOLDEN = Path(__file__).parent.parent / "results" / "golden" / "run" / "profile.json"


def profile(*compute_s: float) -> StepProfile:
    read = StepProfile.read(GOLDEN)
    workers = [
        WorkerTime(rank=n, host="h", compute_s=s, spread_s=0.0) for n, s in enumerate(compute_s)
    ]
    return replace(read, workers=tuple(workers) or read.workers)


def test_each_bar_is_the_whole_time() -> None:
    found = profile()
    step_s = found.step_s.median
    step, workers, epoch = time_pictures(found)
    for bar in (*step.bars, *workers.bars):
        assert sum(bar.parts.values()) == pytest.approx(step_s)
    assert epoch.bars[0].parts["steps"] == pytest.approx(23 * step_s)
    assert "communication not hidden (27 %)" in step.caption


def test_workers_that_are_alike_have_no_bars() -> None:
    assert workers_picture(profile(0.005, 0.0051)) is None
    assert workers_picture(profile(0.005)) is None


def test_of_many_workers_the_extremes_are_drawn() -> None:
    times = [0.004 + 0.00001 * n for n in range(100)]
    picture = workers_picture(profile(*times))
    assert picture is not None
    assert len(picture.bars) == MOST_WORKERS
    assert [bar.label for bar in picture.bars][-1] == "rank 99"
    assert "Rank 99 on h computes longest" in picture.caption


def test_without_costs_of_an_epoch_there_is_no_bar_of_it() -> None:
    slugs = [p.slug for p in time_pictures(replace(profile(), epoch=EpochCosts()))]
    assert slugs == ["step-time", "worker-time"]


def test_the_numbers_are_listed() -> None:
    table = time_table(time_pictures(profile()))
    assert ("step", "communication not hidden", "2 ms", "27 %") in table.rows


def test_a_damaged_profile_is_a_problem(tmp_path: Path) -> None:
    problems: list[str] = []
    assert read_profile(tmp_path / "profile.json", problems) is None
    assert problems == []
    (tmp_path / "profile.json").write_text("{")
    assert read_profile(tmp_path / "profile.json", problems) is None
    assert len(problems) == 1
