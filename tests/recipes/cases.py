"""Trainings of the built-in recipes, made small by their own arguments, on ranks of a test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torchvision  # noqa: F401  # here, not once in every forked rank

from paceline.distributed.allocator import keep_freed_memory
from paceline.distributed.group import Group
from paceline.options.fields import OptionValue
from paceline.recipes.registry import reference_of
from paceline.training.config import TrainConfig, merge
from paceline.training.job import Job
from paceline.training.recipe import load_recipe
from tests.support.ranks import run_ranks
from tests.support.trainings import Outcome, StopAt, run_training_on


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe with small data and a small network; the rest is as it comes."""

    recipe: str
    write: Callable[[Path], Path]
    arguments: Mapping[str, OptionValue] = field(default_factory=dict)
    settings: Mapping[str, OptionValue] = field(default_factory=dict)

    @property
    def target(self) -> float:
        """The validation accuracy to be reached."""
        return float(str(self.settings["target_accuracy"]))

    def config(self, **more: OptionValue) -> TrainConfig:
        """The recipe's settings under those of the case and these."""
        given: dict[str, OptionValue] = {"epochs": 14, "patience": 1, "loader_workers": 0}
        given |= {"progress": "off", "device": "cpu", **self.settings, **more}
        return TrainConfig.from_settings(
            merge(given, load_recipe(reference_of(self.recipe)).settings)
        )

    def make_job(self, data_dir: Path) -> Job:
        """Build the job as a worker does."""
        keep_freed_memory()
        recipe = load_recipe(reference_of(self.recipe))
        return recipe(data_dir=str(data_dir), **self.arguments)


def assert_reaches_its_target(case: Case, scratch: Path) -> None:
    """Train on one worker."""
    data_dir = case.write(scratch / "data")
    (outcome,) = run_ranks(1, _train, scratch / "run", case, data_dir, case.config())
    _assert_at_target(outcome, case)


def assert_reaches_its_target_resumed(case: Case, scratch: Path) -> None:
    """Train on two workers, stopped inside the first epoch; and that epoch without a stop."""
    data_dir = case.write(scratch / "data")

    def train(run: str, stop: StopAt | None = None, **more: OptionValue) -> Outcome:
        config = case.config(**more)
        first, _ = run_ranks(2, _train, scratch / run, case, data_dir, config, stop)
        return first

    stopped = train("run", StopAt(rank=1, forward=4))
    assert stopped.summary["stopped_because"] == "signal"
    assert (stopped.epoch, stopped.step) < (1, 8)
    resumed = train("run")
    _assert_at_target(resumed, case)
    assert resumed.rows[:1] == train("whole", epochs=1, target_accuracy=None).rows


def _train(
    group: Group,
    directory: Path,
    case: Case,
    data_dir: Path,
    config: TrainConfig,
    stop: StopAt | None = None,
) -> Outcome:
    outcome = run_training_on(group, directory, lambda: case.make_job(data_dir), config, stop)
    return replace(outcome, parameters=[])  # too much for a pipe


def _assert_at_target(outcome: Outcome, case: Case) -> None:
    found = outcome.summary
    assert found["stopped_because"] == "target", outcome.rows
    assert float(str(found["val_accuracy"])) >= case.target
