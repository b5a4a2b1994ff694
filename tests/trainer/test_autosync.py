"""Auto measures, chooses, and keeps to it."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.config.fields import OptionValue
from paceline.dist.group import Group
from paceline.trainer import autosync
from paceline.trainer.autochoice import Choice
from paceline.trainer.autosync import AutoSync
from tests.support.ranks import run_ranks
from tests.support.sessions import net, pair_of, points, session_on, sgd
from tests.support.trainings import Outcome, StopAt, configure, noisy_job, run_training_on

pytestmark = pytest.mark.ranks
AUTO: dict[str, OptionValue] = {"sync": "auto", "optimizer": "sgd", "momentum": 0.9}
LOCAL = Choice(method="local", why="a test says so", every=3, delay=1, half_first=True)
AUTO_SCRIPT: dict[str, OptionValue] = {"sync": "auto", "progress": "plain"}
HALF = Choice(method="bf16", why="a test says so")


def train(
    group: Group,
    directory: Path,
    first: Choice | None,
    final: Choice | None,
    epochs: int,
    stop: StopAt | None,
) -> Outcome:
    """Measure for eight steps each, and come to these choices; None: to what is measured."""
    autosync._LEAST_S = 0.0
    if first is not None or final is not None:
        chosen = {"first_choice": lambda _: first, "final_choice": lambda *_, **__: final}
        vars(autosync).update(chosen)
    config = configure(epochs=epochs, **AUTO)
    (directory / "run.json").parent.mkdir(exist_ok=True)
    if group.rank == 0 and not (directory / "run.json").exists():
        (directory / "run.json").write_text(json.dumps({"derived": {"device": "cpu"}}))
    return run_training_on(group, directory, noisy_job, config, stop)


def noted(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "run.json").read_text())["derived"]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_it_measures_leads_to_a_choice(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(world_size, train, tmp_path, None, None, 3, None)
    chosen = {outcome.summary["sync_chosen"] for outcome in found}
    assert len(chosen) == 1
    assert chosen <= {"allreduce", "bf16", "local"}
    assert {outcome.summary["sync"] for outcome in found} == {"auto"}
    told = str(noted(tmp_path)["sync"])
    assert told.startswith(f"auto: {chosen.pop()}")
    assert noted(tmp_path)["device"] == "cpu"
    assert any(told in line for line in found[0].lines)
    assert all(map(torch.equal, found[0].parameters, found[1].parameters))


def test_one_worker_has_nothing_to_measure(tmp_path: Path) -> None:
    (found,) = run_ranks(1, train, tmp_path, None, None, 1, None)
    assert found.summary["sync_chosen"] is None


# A pass of 7 steps gives 6 times, 8 are enough: bf16 is tried from step 10 on, the choice is made
# at step 20, and `local` begins with the fourth epoch, at step 21.
@pytest.mark.parametrize(
    ("final", "forward"),
    [(LOCAL, 20), (LOCAL, 25), (HALF, 25)],
    ids=["local-chosen", "local-under-way", "bf16"],
)
def test_a_resumed_training_keeps_the_choice_exactly(
    final: Choice, forward: int, tmp_path: Path
) -> None:
    whole = run_ranks(2, train, tmp_path / "whole", None, final, 5, None)
    stop = StopAt(rank=1, forward=forward)
    cut = run_ranks(2, train, tmp_path / "legs", None, final, 5, stop)
    assert cut[0].step == forward
    resumed = run_ranks(2, train, tmp_path / "legs", None, final, 5, None)
    assert resumed[0].summary["sync_chosen"] == final.method
    assert resumed[0].summary["weights_sha256"] == whole[0].summary["weights_sha256"]
    assert all(map(torch.equal, resumed[1].parameters, whole[1].parameters))
    assert resumed[0].rows[-1]["train_loss"] == whole[0].rows[-1]["train_loss"]


def test_bf16_is_tried_and_left_again(tmp_path: Path) -> None:
    plain = Choice(method="allreduce", why="a test says so")
    found = run_ranks(2, train, tmp_path, None, plain, 3, None)
    assert found[0].summary["sync_chosen"] == "allreduce"
    straight = run_ranks(2, train, tmp_path / "straight", plain, None, 3, None)
    assert straight[0].summary["sync_chosen"] == "allreduce"
    assert straight[0].losses[:8] == found[0].losses[:8]
    assert straight[0].losses[-1] != found[0].losses[-1]  # bf16 had been there


def test_other_workers_measure_again(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, None, HALF, 5, StopAt(rank=0, forward=20))
    found = run_ranks(3, train, tmp_path, LOCAL, None, 9, None)
    assert found[0].summary["sync_chosen"] == "local"
    assert found[0].step == 63


def test_epochs_of_one_step_are_measured_as_well(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        autosync._LEAST_S = 0.0
        vars(autosync).update({"first_choice": lambda _: HALF})
        with session_on(group, tmp_path, AUTO_SCRIPT) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points(8)), global_batch=8)
            for _ in s.epochs(9):
                for batch in batches:
                    s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
            sync = s.engine.sync
            assert isinstance(sync, AutoSync)
            return sync.describe()

    for said in run_ranks(2, body):
        assert said == "auto: bf16, since a test says so"


def test_rank_0_alone_chooses_and_only_what_the_training_can_bear(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that steps outside the loop has no local steps, whenever it begins to."""

    def body(group: Group) -> str:
        autosync._LEAST_S = 0.0

        def choose(_: object) -> Choice:
            assert group.rank == 0
            return LOCAL

        vars(autosync).update({"first_choice": choose})
        with session_on(group, tmp_path, AUTO_SCRIPT) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=8)
            for epoch in s.epochs(4):
                if epoch == 2:  # the choice is made, and hasn't begun
                    s.step(model(torch.ones(2, 5)).square().mean())
                for batch in batches:
                    s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
            sync = s.engine.sync
            assert isinstance(sync, AutoSync)
            return sync.describe()

    for said in run_ranks(2, body):
        assert said.startswith("auto: bf16, since local steps don't go with this training")
    assert capfd.readouterr().out.count("local steps don't go with this training") == 1


def test_a_resumed_training_that_cannot_be_local_goes_on_alike(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, train, tmp_path, LOCAL, None, 5, StopAt(rank=1, forward=16))

    def body(group: Group) -> Outcome:
        vars(autosync).update({"can_be_local": lambda _: False})
        return train(group, tmp_path, LOCAL, None, 5, None)

    found = run_ranks(2, body)
    assert found[0].summary["sync_chosen"] == "bf16"
    assert found[0].step == 35
    assert "all go on from the average" in capfd.readouterr().out
