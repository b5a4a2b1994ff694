"""Trying changes of a training, with commands that only pretend to train."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.options.fields import OptionValue
from paceline.scaling.plan import Size
from paceline.scaling.tuner import TunedTraining, Tuner
from tests.scaling.studies import profile
from tests.scaling.test_measurement import METRICS

PROGRAM = (sys.executable, "-S", "-c")
SETTINGS = {"precision": "fp32", "loader_workers": 2, "compile": False, "shards": None}
DERIVED = {
    "threads": 1,
    "memory_format": "channels-last",
    "batchnorm_per_worker": False,
    "global_batch": 64,
    "steps_per_epoch": 3,
    "train_samples": 150,
}
Speed = Callable[[Mapping[str, OptionValue]], float]


@dataclass
class Pretended:
    """Leaves a run directory as a training would, and gives a command that ends at once."""

    speed: Speed
    """Samples a second, by the settings; below 0: it fails."""
    given: Mapping[str, OptionValue] = field(default_factory=dict)
    seconds: float = 0.0
    asked: list[tuple[int, Mapping[str, OptionValue], float]] = field(default_factory=list)
    loss: Callable[[Mapping[str, OptionValue]], float] = lambda _given: 0.4
    trained: list[Mapping[str, OptionValue]] = field(default_factory=list)
    resumed: list[Path] = field(default_factory=list)
    swept: list[Path] = field(default_factory=list)

    def measure(self, size: Size, run_dir: Path, batch: int | None) -> Sequence[str]:
        given = {**self.given, "workers": size.workers}
        self.asked.append((size.workers, self.given, self.seconds))
        speed = self.speed(given)
        if speed < 0:
            return ("print('paceline: no such thing'); raise SystemExit(2)",)
        self._leave(run_dir)
        # Compiling takes 20 s, and the steps are 1 s each.
        start_s = 20.0 if given.get("compile") else 0.0
        found = profile(size.workers, 1.0)
        found = replace(found, images_per_s=speed, global_batch=batch or 64 * size.workers)
        (run_dir / "profile.json").write_text(found.to_json())
        summary = {"steps": 10, "train_time_s": 10.0 + start_s}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return ("pass",)

    def train(self, size: Size, run_dir: Path, batch: int | None) -> Sequence[str]:
        self.trained.append(self.given)
        self._leave(run_dir)
        summary = {"epochs": 2, "best_val_loss": self.loss(self.given)}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return ("pass",)

    def resume(self, size: Size, run_dir: Path) -> Sequence[str]:
        self.resumed.append(run_dir)
        summary = {"epochs": 2, "best_val_loss": self.loss(self.given)}
        (run_dir / "summary.json").write_text(json.dumps(summary))
        return ("pass",)

    def remove_snapshots(self, size: Size, run_dir: Path) -> None:
        self.swept.append(run_dir)

    def _leave(self, run_dir: Path) -> None:
        (run_dir / "snapshots").mkdir(parents=True)
        (run_dir / "run.json").write_text(json.dumps({"settings": SETTINGS, "derived": DERIVED}))
        (run_dir / "metrics.csv").write_text(METRICS)


def make_tuner(
    place: Path, pretended: Pretended, *, budget_s: float = 1e6, check_quality: bool = False
) -> tuple[Tuner, list[str]]:
    said: list[str] = []

    def commands(given: Mapping[str, OptionValue], seconds: float) -> Pretended:
        pretended.given, pretended.seconds = given, seconds
        return pretended

    place.mkdir(exist_ok=True)
    known = "compile memory_format precision workers threads max_batch_per_worker loader_workers"
    tuner = Tuner(
        place=place,
        training=TunedTraining(
            name="digits",
            given={"lr": 0.1},
            fixed=frozenset({"lr", "max_batch_per_worker"}),
            known=frozenset(known.split()),
            commands=commands,
            size=Size(workers=2, nodes=1, method="allreduce"),
            batch=64,
        ),
        budget_s=budget_s,
        seconds=5.0,
        check_quality=check_quality,
        print_line=said.append,
        program=PROGRAM,
    )
    return tuner, said


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.scaling.tuner.usable_cores", lambda: 2)


def usual_speed(given: Mapping[str, OptionValue]) -> float:
    """Compiled code is twice as fast, one worker half again; contiguous tensors are slow."""
    speed = 100.0
    if given.get("compile"):
        speed *= 2.0
    if given.get("workers") == 1:
        speed *= 1.5
    if given.get("precision") == "bf16":
        speed *= 1.25
    if given.get("memory_format"):
        speed *= 0.8
    return speed


def test_what_gains_is_taken_together_and_measured_again(tmp_path: Path) -> None:
    pretended = Pretended(usual_speed)
    tuner, said = make_tuner(tmp_path, pretended)
    tuner.run()
    means = {tried.change.name: tried.gain.mean for tried in tuner.tried}
    assert means == pytest.approx({"compile": 2.0, "contiguous": 0.8, "bf16": 1.25, "1x2": 1.5})
    assert [tried.verdict for tried in tuner.tried] == [
        "faster",
        "no sure gain",
        "faster; --check-quality would evaluate its result",
        "faster",
    ]
    assert tuner.confirmed is not None
    assert tuner.confirmed.is_recommended
    assert tuner.confirmed.change.settings == {"compile": True, "workers": 1, "threads": 2}
    assert tuner.confirmed.gain.mean == pytest.approx(3.0)
    assert tuner.confirmed.gain.start_s == pytest.approx(20.0)
    assert all(given["lr"] == 0.1 for _, given, _ in pretended.asked)
    assert said[0].startswith("Tunes digits: 100 samples/s as it is on 2 x 1 threads; 4 changes")
    assert not list(tmp_path.glob("runs/*/snapshots"))


@pytest.mark.slow
def test_each_change_stands_beside_a_trial_of_the_training_as_it_is(tmp_path: Path) -> None:
    pretended = Pretended(usual_speed)
    tuner, _ = make_tuner(tmp_path, pretended)
    tuner.run()
    names = [
        next((n for n in ("compile", "memory_format", "precision", "threads") if n in given), "-")
        for _, given, _ in pretended.asked
    ]
    first, second = names[1:7], names[7:12]
    assert first == ["compile", "-", "memory_format", "precision", "-", "threads"]
    assert second == ["precision", "-", "compile", "-", "threads"]  # one was hopeless


@pytest.mark.slow
def test_what_compiles_has_longer_trials_as_long_as_it_needs_them(tmp_path: Path) -> None:
    pretended = Pretended(usual_speed)
    tuner, _ = make_tuner(tmp_path, pretended)
    tuner.run()
    seconds = [seconds for _, given, seconds in pretended.asked if "compile" in given]
    assert seconds == [50.0, *[25.0] * (len(seconds) - 1)]
    assert {s for _, given, s in pretended.asked if "compile" not in given} == {5.0}


def test_noise_is_no_gain(tmp_path: Path) -> None:
    trials = iter(range(1000))

    def noisy(_given: Mapping[str, OptionValue]) -> float:
        return (100.0, 97.0, 108.0, 103.0, 92.0)[next(trials) % 5]

    tuner, _ = make_tuner(tmp_path, Pretended(noisy))
    tuner.run()
    assert tuner.confirmed is None or not tuner.confirmed.is_recommended


@pytest.mark.slow
def test_a_gain_that_isnt_there_the_second_time_is_not_taken(tmp_path: Path) -> None:
    def lucky(given: Mapping[str, OptionValue]) -> float:
        is_again = any("confirm-" in path.name for path in (tmp_path / "runs").iterdir())
        return 200.0 if given.get("compile") and not is_again else 100.0

    tuner, _ = make_tuner(tmp_path, Pretended(lucky))
    tuner.run()
    assert tuner.tried[0].is_recommended
    assert tuner.confirmed is not None
    assert not tuner.confirmed.is_recommended


def test_what_fails_is_said_and_not_tried_again(tmp_path: Path) -> None:
    def failing(given: Mapping[str, OptionValue]) -> float:
        return -1.0 if given.get("compile") else 100.0

    pretended = Pretended(failing)
    tuner, said = make_tuner(tmp_path, pretended)
    tuner.run()
    assert tuner.tried[0].verdict == "failed: no such thing"
    assert "  compile: no such thing" in said
    assert len([given for _, given, _ in pretended.asked if "compile" in given]) == 1


@pytest.mark.slow
def test_another_global_batch_is_another_training(tmp_path: Path) -> None:
    tuner, _ = make_tuner(tmp_path, Pretended(usual_speed))
    tuner.training = replace(tuner.training, batch=None)  # a script's own
    tuner.run()
    by_name = {tried.change.name: tried.verdict for tried in tuner.tried}
    assert by_name["1x2"] == "failed: its global batch is 64 instead of 128"


def test_a_training_that_fails_as_it_is_is_not_tuned(tmp_path: Path) -> None:
    tuner, _ = make_tuner(tmp_path, Pretended(lambda _given: -1.0))
    with pytest.raises(UsageError, match="digits can't be measured: no such thing"):
        tuner.run()  # the training's own exit code


@pytest.mark.slow
def test_where_the_training_as_it_is_fails_its_neighbours_are_tried_again(tmp_path: Path) -> None:
    failures = iter([False, True])

    def failing_once(given: Mapping[str, OptionValue]) -> float:
        """Fail in the second trial of the training as it is."""
        is_changed = given.keys() & {"compile", "memory_format", "precision", "threads"}
        return -1.0 if not is_changed and next(failures, False) else 100.0

    tuner, said = make_tuner(tmp_path, Pretended(failing_once))
    tuner.run()
    assert "  compile: the training as it is failed beside it: no such thing" in said
    assert not [each.verdict for each in tuner.tried if each.verdict.startswith("failed")]


@pytest.mark.slow
def test_trials_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    make_tuner(tmp_path, Pretended(usual_speed))[0].run()
    (tmp_path / "measured" / "compile-2.json").unlink()
    pretended = Pretended(usual_speed)
    tuner, _ = make_tuner(tmp_path, pretended)
    tuner.run()
    assert [given for _, given, _ in pretended.asked] == [{"lr": 0.1, "compile": True}]
    assert tuner.confirmed is not None
    assert tuner.confirmed.gain.mean == pytest.approx(3.0)


def test_a_change_for_which_there_is_no_time_is_left_and_a_cheaper_one_tried(
    tmp_path: Path,
) -> None:
    """Compiling takes 45 s, three trials 15 s; none of them takes any here."""
    tuner, _ = make_tuner(tmp_path, Pretended(usual_speed), budget_s=45.0)
    tuner.run()
    by_name = {tried.change.name: len(tried.gain.ratios) for tried in tuner.tried}
    assert by_name["compile"] == 0
    assert by_name["contiguous"] == 1


@pytest.mark.slow
def test_results_are_compared_from_three_seeds_where_that_is_asked_for(tmp_path: Path) -> None:
    def worse(given: Mapping[str, OptionValue]) -> float:
        return 0.4 if given.get("precision") is None else 0.401

    pretended = Pretended(usual_speed, loss=worse)
    tuner, said = make_tuner(tmp_path, pretended, check_quality=True)
    tuner.run()
    by_name = {tried.change.name: tried for tried in tuner.tried}
    assert by_name["bf16"].losses == ((0.4,) * 3, (0.401,) * 3)
    assert by_name["bf16"].verdict == "faster, as good"
    assert [given["seed"] for given in pretended.trained] == [0, 1, 2] * 2
    assert pretended.resumed == []
    assert "  bf16: a whole training from seed 2" in said
    assert tuner.confirmed is not None
    assert "precision" in tuner.confirmed.change.settings


@pytest.mark.slow
def test_a_whole_training_that_a_signal_has_ended_is_gone_on_with(tmp_path: Path) -> None:
    pretended = Pretended(usual_speed)
    tuner, _ = make_tuner(tmp_path, pretended, check_quality=True)
    begun = tmp_path / "quality" / "bf16-1"
    begun.mkdir(parents=True)
    (begun / "run.json").write_text(json.dumps({"settings": SETTINGS, "derived": DERIVED}))
    (begun / "metrics.csv").write_text(METRICS)
    summary = {"best_val_loss": 9.0, "stopped_because": "signal"}
    (begun / "summary.json").write_text(json.dumps(summary))
    tuner.run()
    assert pretended.resumed == [begun]
    by_name = {tried.change.name: tried for tried in tuner.tried}
    assert by_name["bf16"].losses == ((0.4,) * 3, (0.4,) * 3)
