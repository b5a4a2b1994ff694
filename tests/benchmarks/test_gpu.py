"""`make gpu`: parts that fail or come too late, and a run on a pretend device that is stopped."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.commands import ROOT
from benchmarks.figures import Figure, Report
from benchmarks.gpu import (
    Blocks,
    Part,
    figures_of,
    measure_all,
)
from benchmarks.gpu_sides import Case
from tests.launch.waiting import until
from tests.pretend_gpu.build import build, environment
from tests.support.needs import PRETEND_GPU, need

CASE = Case(by="paceline", network="mnist", batch=10, size=28, block_steps=1, epoch_steps=4)


def noting(what: str) -> Callable[[Report], None]:
    return lambda report: report.figures.append(Figure(what=what, value=1.0, unit=""))


def failing(report: Report) -> None:
    raise RuntimeError("paceline: no memory\nand a traceback")


def test_a_part_that_fails_is_told_and_the_rest_is_measured() -> None:
    report, saved = Report(name="gpu"), list[str]()
    parts = [
        Part(title="first", measure=noting("first")),
        Part(title="second", measure=failing),
        Part(title="third", measure=noting("third")),
    ]
    assert not measure_all(parts, 1.0, report, lambda: saved.append(report.as_markdown()))
    assert [figure.what for figure in report.figures] == ["first", "third"]
    assert report.remarks == ["second: failed: paceline: no memory"]
    assert "and a traceback" in str(report.raw["second: failed"])
    assert "not measured: first; second; third" in saved[0]
    assert "| first" in saved[1]
    assert "not measured: second; third" in saved[1]


def test_no_part_begins_when_the_time_is_up() -> None:
    report = Report(name="gpu")
    assert measure_all([Part(title="first", measure=failing)], -1.0, report, lambda: None)
    assert report.remarks == ["the time was up; not measured: first"]


def test_first_blocks_and_ends_of_epochs_dont_count() -> None:
    ours = [9.0, 9.0, 1.0, 9.0, 1.0, 1.0, 1.0, 9.0]
    blocks = Blocks(ours=ours, theirs=[2.0] * 8, ours_bytes=3 * 10**9, theirs_bytes=2 * 10**9)
    speed, memory = figures_of("title", CASE, 1, blocks)
    assert (speed.value, speed.count, speed.note) == (2.0, 4, "10 against 5 images/s")
    assert (memory.value, memory.note) == (1.5, "3.00 against 2.00 GB")


@pytest.mark.pretend_gpu
def test_what_was_measured_is_there_after_a_signal(tmp_path: Path) -> None:
    need(PRETEND_GPU)
    words = [sys.executable, "-m", "benchmarks.gpu", "--quick", "--output", str(tmp_path / "gpu")]
    process = subprocess.Popen(
        [*words, "--only", "bf16, 1 GPU"], cwd=ROOT, env=environment(build())
    )
    table = tmp_path / "gpu.md"
    try:
        until(lambda: table.exists() and "| resnet50, bf16, 1 GPU" in table.read_text(), 240)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
    assert (
        "not measured: wideresnet, bf16, 1 GPU / the same by hand; transformer" in table.read_text()
    )
    content = json.loads((tmp_path / "gpu.json").read_text())
    (blocks,) = content["raw"].values()
    assert len(blocks["ours"]) == len(blocks["theirs"]) == 8
    assert min(blocks["ours_bytes"], blocks["theirs_bytes"]) > 1_000_000
