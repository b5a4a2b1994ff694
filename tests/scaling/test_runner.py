"""Going through a study's measurements, with commands that only pretend to train."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.errors import ExitCode, UsageError
from paceline.launch.signals import signals_raised
from paceline.results.study import Mode
from paceline.scaling.plan import Measurement, Size, make_plan
from paceline.scaling.runner import Runner, exit_code_of
from paceline.scaling.subprocess_runner import InterruptedStudyError
from tests.scaling.studies import failed, keep_record, measured, profile, size
from tests.scaling.test_measurement import METRICS, RUN

PROGRAM = (sys.executable, "-S", "-c")
GOOD = ("pass",)
BAD = ("print('paceline: unknown recipe'); raise SystemExit(2)",)
ENDLESS = """
import os, signal, sys
signal.signal(2, lambda *_: sys.exit(75))
os.rename("run.later", "run.json")
signal.pause()
"""


@dataclass
class Pretended:
    """Leaves a run directory as a training would, and gives a command that ends at once."""

    bad: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Commands that fail, by the size's name."""
    endless: bool = False
    run: Mapping[str, object] = field(default_factory=lambda: RUN)
    stopped_because: str = "time"
    sync: str | None = None
    """What the trainings combine gradients by, whatever they are asked for."""
    asked: list[tuple[str, str, int | None]] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)

    def measure(self, size: Size, run_dir: Path, batch: int | None) -> Sequence[str]:
        self.asked.append(("measure", size.name, batch))
        if size.name in self.bad:
            return self.bad[size.name]
        self._leave(size, run_dir)
        if self.endless:
            (run_dir / "run.json").rename(run_dir / "run.later")
            return (f"import os; os.chdir({str(run_dir)!r}){ENDLESS}",)
        return GOOD

    def train(self, size: Size, run_dir: Path, batch: int | None) -> Sequence[str]:
        self.asked.append(("train", size.name, batch))
        self._leave(size, run_dir)
        return self.bad.get(size.name, GOOD)

    def resume(self, size: Size, run_dir: Path) -> Sequence[str]:
        self.asked.append(("resume", size.name, None))
        self._leave(size, run_dir)
        return GOOD

    def remove_snapshots(self, size: Size, run_dir: Path) -> None:
        self.swept.append(run_dir.name)

    def _leave(self, size: Size, run_dir: Path) -> None:
        (run_dir / "snapshots").mkdir(parents=True, exist_ok=True)
        (run_dir / "run.json").write_text(json.dumps(self.run))
        (run_dir / "metrics.csv").write_text(METRICS)
        (run_dir / "profile.json").write_text(
            profile(size.workers, 1.0, sync=self.sync or size.method).to_json()
        )
        summary = {"epochs": 2, "stopped_because": self.stopped_because}
        (run_dir / "summary.json").write_text(json.dumps(summary))


@dataclass
class Studied:
    """A runner, and what it said."""

    place: Path
    commands: Pretended = field(default_factory=Pretended)
    mode: Mode = "weak"
    batch: int | None = 32
    seconds: float = 20.0
    said: list[str] = field(default_factory=list)
    kept: int = 0

    def runner(self, print_line: Callable[[str], None] | None = None) -> Runner:
        def keep() -> None:
            self.kept += 1

        return Runner(
            place=self.place,
            commands=self.commands,
            mode=self.mode,
            seconds=self.seconds,
            program=PROGRAM,
            batch=self.batch,
            own_batch=self.mode == "strong",
            print_line=print_line or self.said.append,
            keep=keep,
        )


SIZES = (size(1), size(2), size(4))


def test_what_is_measured_is_kept_and_its_snapshots_are_not(tmp_path: Path) -> None:
    studied, plan = Studied(tmp_path), make_plan(SIZES, 1)
    runner = studied.runner()
    runner.measure(plan)
    assert [ask[2] for ask in studied.commands.asked] == [32, 64, 128]
    assert [len(records) for records in runner.measured(plan).values()] == [1, 1, 1]
    assert studied.kept == 3
    assert studied.commands.swept == [m.name for m in plan]
    assert not list(tmp_path.glob("runs/*/snapshots"))
    assert studied.said[0].startswith(
        "[1/3] 1 worker, allreduce, round 1; 3 left, about 1 min 30 s"
    )
    assert studied.said[1].strip() == "32 images/s, 1,000 ms a step"
    assert exit_code_of(runner.measured(plan), runner.failures) == ExitCode.DONE


def test_what_is_there_is_not_measured_again_and_what_failed_is(tmp_path: Path) -> None:
    keep_record(tmp_path, measured(1, 0.8))
    keep_record(tmp_path, failed(2, "a link broke", 70))
    studied = Studied(tmp_path)
    studied.runner().measure(make_plan(SIZES[:2], 1))
    assert [ask[1] for ask in studied.commands.asked] == ["2-allreduce"]
    assert studied.said[0] == "1 of 2 measurements are there already"
    assert studied.said[1].startswith("[2/2] 2 workers")


def test_a_size_that_fails_is_not_tried_again_and_the_rest_goes_on(tmp_path: Path) -> None:
    studied = Studied(tmp_path, Pretended(bad={"2-allreduce": BAD}))
    runner, plan = studied.runner(), make_plan(SIZES, 2)
    runner.measure(plan)
    found = runner.measured(plan)
    assert [len(found[each]) for each in SIZES] == [2, 1, 2]
    assert "unknown recipe" in (found[SIZES[1]][0].problem or "")
    assert any("failed: unknown recipe" in line for line in studied.said)
    assert exit_code_of(found, runner.failures) == ExitCode.DONE


def test_wrong_usage_of_one_worker_ends_the_study(tmp_path: Path) -> None:
    studied = Studied(tmp_path, Pretended(bad={"1-allreduce": BAD}))
    with pytest.raises(UsageError, match="unknown recipe"):
        studied.runner().measure(make_plan(SIZES, 1))


def test_a_script_with_a_method_of_its_own_isnt_measured_as_another(tmp_path: Path) -> None:
    studied = Studied(tmp_path, Pretended(sync="powersgd"))
    with pytest.raises(UsageError, match="by powersgd, and allreduce was to be measured"):
        studied.runner().measure(make_plan(SIZES, 1))
    studied.runner().measure([Measurement(size=size(2), round=1)])
    assert "failed: the training combined its gradients by powersgd" in studied.said[-1]


def test_where_nothing_was_measured_the_exit_code_is_the_failures() -> None:
    found = {size(1): [failed(1, "a link broke", 70)], size(2): [failed(2, "a bug")]}
    assert exit_code_of(found, [70, 65]) == ExitCode.INFRASTRUCTURE
    assert exit_code_of({}, []) == ExitCode.JOB


def test_what_refuses_a_time_budget_is_stopped_after_its_seconds(tmp_path: Path) -> None:
    studied = Studied(tmp_path, Pretended(endless=True), seconds=0.3)
    runner, plan = studied.runner(), [Measurement(size=size(2, "ordered"), round=1)]
    runner.measure(plan)
    ((record,),) = runner.measured(plan).values()
    assert (record.problem, record.images_per_s) == (None, 64.0)
    assert record.wall_s > 0.3


def test_the_batch_of_a_script_is_learnt_from_one_worker(tmp_path: Path) -> None:
    studied = Studied(tmp_path, batch=None)
    studied.runner().measure(make_plan(SIZES, 1))
    assert [ask[2] for ask in studied.commands.asked] == [None, 64, 128]


def test_a_script_shares_its_own_batch_with_strong_scaling(tmp_path: Path) -> None:
    run = {**RUN, "kind": "script", "given": []}
    studied = Studied(tmp_path, Pretended(run=run), mode="strong", batch=None)
    studied.runner().measure(make_plan(SIZES, 1))
    assert [ask[2] for ask in studied.commands.asked] == [None, None, None]
    studied = Studied(tmp_path / "weak", Pretended(run=run), batch=None)
    studied.place.mkdir()
    with pytest.raises(UsageError, match="settles its own global batch of 64"):
        studied.runner().measure(make_plan(SIZES, 1))


def test_without_the_script_s_batch_nothing_else_can_be_measured(tmp_path: Path) -> None:
    keep_record(tmp_path, failed(1, "a link broke", 70))
    studied = Studied(tmp_path, Pretended(), batch=None)
    studied.runner().measure([Measurement(size=size(2), round=1)])
    assert studied.commands.asked == []
    assert "the batch of a worker isn't known" in studied.said[1]


def test_a_signal_leaves_no_measurement_half_done(tmp_path: Path) -> None:
    plan = make_plan(SIZES, 1)

    def print_line(line: str) -> None:
        if line.startswith("[2/3]"):
            os.kill(os.getpid(), signal.SIGTERM)

    studied = Studied(tmp_path)
    with pytest.raises((InterruptedStudyError, KeyboardInterrupt)), signals_raised():
        studied.runner(print_line).measure(plan)
    assert [path.name for path in (tmp_path / "measured").iterdir()] == ["1-allreduce-1.json"]
    assert not (tmp_path / "runs" / "2-allreduce-1").exists()


def test_whole_trainings_are_gone_on_with(tmp_path: Path) -> None:
    studied = Studied(tmp_path, Pretended(stopped_because="signal"))
    runner = studied.runner()
    runner.train(SIZES[:1])
    assert runner.trained(SIZES) == {}
    studied.commands.stopped_because = "epochs"
    runner.train(SIZES[:2])
    runner.train(SIZES[:2])
    assert [ask[:2] for ask in studied.commands.asked] == [
        ("train", "1-allreduce"),
        ("resume", "1-allreduce"),
        ("train", "2-allreduce"),
    ]
    assert {each.workers: t.epochs for each, t in runner.trained(SIZES).items()} == {1: 2, 2: 2}


def test_a_whole_training_that_fails_is_told(tmp_path: Path) -> None:
    studied = Studied(tmp_path, Pretended(bad={"2-allreduce": BAD}, stopped_because="signal"))
    runner = studied.runner()
    runner.train(SIZES)
    (problem,) = runner.problems
    assert problem.startswith("The training on 2 workers, allreduce failed: unknown recipe")
    assert runner.failures == [ExitCode.USAGE]
