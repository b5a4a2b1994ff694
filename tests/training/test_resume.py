from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.options.fields import OptionValue
from paceline.training.config import TrainConfig
from paceline.training.setup import open_session
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import net, pair_of, points, session_on, sgd
from tests.support.tiers import slow
from tests.support.trainings import (
    MakeJob,
    Outcome,
    StopAt,
    configure,
    global_batches,
    listed_job,
    noisy_job,
    plain_job,
    prepared,
    run_training_on,
)

pytestmark = pytest.mark.ranks
# 50 samples in batches of 8: 7 steps an epoch, the last with 2 samples.
STEPS = 7


def train_in_legs(
    world_size: int,
    directory: Path,
    make_job: MakeJob,
    stops: list[StopAt],
    **settings: OptionValue,
) -> list[list[Outcome]]:
    """Start a training as often as there are stops, and once more; each start in new processes."""
    config = configure(**settings)
    return [
        run_ranks(world_size, run_training_on, directory, make_job, config, stop)
        for stop in (*stops, None)
    ]


def assert_same_training(legs: list[list[Outcome]], whole: list[Outcome]) -> None:
    resumed = legs[-1]
    assert resumed[0].summary["weights_sha256"] == whole[0].summary["weights_sha256"]
    assert all(map(torch.equal, resumed[-1].parameters, whole[-1].parameters))
    assert [o.optimizer for o in resumed] == [o.optimizer for o in whole]
    assert resumed[0].rows == whole[0].rows
    assert resumed[0].samples_seen == whole[0].samples_seen
    steps = [batch for leg in legs for batch in leg[0].trained]
    assert steps == whole[0].trained


def positions(legs: list[list[Outcome]]) -> list[tuple[int, int]]:
    for leg in legs:
        assert len({(o.epoch, o.step_in_epoch, o.step) for o in leg}) == 1
    return [(leg[0].epoch, leg[0].step_in_epoch) for leg in legs[:-1]]


OPTIMIZERS: list[object] = [
    {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "schedule": "cosine"},
    {"optimizer": "adamw", "warmup_steps": 10, "clip_norm": 1.0},
    slow({"optimizer": "adadelta", "label_smoothing": 0.1}),
    {"optimizer": "novograd", "grad_averaging": True, "schedule": "one-cycle"},
    slow({"optimizer": "lars"}),
    slow({"optimizer": "lamb", "schedule": "step", "step_epochs": 1}),
]


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=lambda s: s["optimizer"])
@pytest.mark.slow
def test_three_resumes_inside_an_epoch_change_no_bit(
    settings: dict[str, OptionValue], tmp_path: Path
) -> None:
    stops = [
        StopAt(rank=1, forward=STEPS + 2),
        StopAt(rank=0, forward=2),
        StopAt(rank=1, forward=2),
    ]
    whole = run_ranks(
        2, run_training_on, tmp_path / "whole", noisy_job, configure(**settings), None
    )
    legs = train_in_legs(2, tmp_path / "legs", noisy_job, stops, **settings)
    assert positions(legs) == [(1, 2), (1, 4), (1, 6)]
    assert_same_training(legs, whole)


@pytest.mark.parametrize("world_size", [1, slow(2), 3])
@pytest.mark.slow
def test_resumes_at_the_edges_of_an_epoch_change_no_bit(world_size: int, tmp_path: Path) -> None:
    last = world_size - 1
    stops = [
        StopAt(rank=0, forward=1),
        StopAt(rank=0, forward=STEPS - 1),  # in the short batch, of which rank 2 has no sample
        StopAt(rank=last, forward=1, training=False),  # while the first epoch is evaluated
    ]
    whole = run_ranks(world_size, run_training_on, tmp_path / "whole", noisy_job, configure(), None)
    legs = train_in_legs(world_size, tmp_path / "legs", noisy_job, stops)
    assert positions(legs) == [(0, 1), (0, STEPS), (1, 0)]
    assert_same_training(legs, whole)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"max_batch_per_worker": 3},
        {"global_batch": 16, "drop_last": True, "max_batch_per_worker": 3},
    ],
    ids=lambda s: "-".join(s),
)
@pytest.mark.slow
def test_resume_is_exact_however_a_step_is_computed(
    settings: dict[str, OptionValue], tmp_path: Path
) -> None:
    whole = run_ranks(
        2, run_training_on, tmp_path / "whole", noisy_job, configure(**settings), None
    )
    stops = [StopAt(rank=1, forward=5), StopAt(rank=0, forward=3)]
    legs = train_in_legs(2, tmp_path / "legs", noisy_job, stops, **settings)
    assert len(positions(legs)) == 2
    assert_same_training(legs, whole)


@pytest.mark.parametrize("loader_workers", [0, 1])
@pytest.mark.slow
def test_resume_is_exact_with_a_data_set_of_the_users_own(
    loader_workers: int, tmp_path: Path
) -> None:
    config = configure(loader_workers=loader_workers)
    whole = run_ranks(2, run_training_on, tmp_path / "whole", listed_job, config, None)
    stops = [StopAt(rank=1, forward=3), StopAt(rank=0, forward=STEPS - 3)]
    legs = train_in_legs(2, tmp_path / "legs", listed_job, stops, loader_workers=loader_workers)
    assert positions(legs) == [(0, 3), (0, STEPS)]
    assert_same_training(legs, whole)


@pytest.mark.slow
def test_a_finished_training_is_left_as_it_is(tmp_path: Path) -> None:
    first, second = train_in_legs(2, tmp_path, noisy_job, [StopAt(rank=0, forward=999)])
    assert second[0].trained == []
    assert second[0].summary["weights_sha256"] == first[0].summary["weights_sha256"]
    assert second[0].rows == first[0].rows
    assert second[0].summary["stopped_because"] == "epochs"


@pytest.mark.parametrize("worlds", [(1, 3), (2, 1), (3, 2), (2, 4)])
@pytest.mark.core_cases(1)
def test_another_number_of_workers_goes_on_with_the_same_order(
    worlds: tuple[int, int], tmp_path: Path
) -> None:
    before, after = worlds
    config = configure(epochs=2)
    stop = StopAt(rank=0, forward=4)
    first = run_ranks(before, run_training_on, tmp_path / "run", plain_job, config, stop)
    then = run_ranks(after, run_training_on, tmp_path / "run", plain_job, config, None)
    whole = run_ranks(1, run_training_on, tmp_path / "whole", plain_job, config, None)
    assert (first[0].step, then[0].step) == (4, 2 * STEPS)
    assert global_batches(first) + global_batches(then) == global_batches(whole)
    assert [row["train_loss"][:5] for row in then[0].rows] == [
        row["train_loss"][:5] for row in whole[0].rows
    ]
    assert then[0].samples_seen == whole[0].samples_seen == 100


def test_with_fp16_the_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    def body(group: Group, epochs: int) -> tuple[object, object]:
        with session_on(group, tmp_path, {"precision": "fp16"}) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=8)
            scaler = s.engine.context.scaler
            assert scaler is not None
            fresh = scaler.state_dict()
            for _ in s.epochs(epochs):
                if epochs == 2:
                    break
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
            return fresh, scaler.state_dict()

    ((fresh, first),) = run_ranks(1, body, 1)
    ((_, resumed),) = run_ranks(1, body, 2)
    assert resumed == first != fresh


def test_the_optimizers_options_that_are_given_now_hold_and_others_are_the_snapshots(
    tmp_path: Path,
) -> None:
    def body(group: Group, momentum: float, decay: float, epochs: int) -> tuple[float, float]:
        config = TrainConfig.from_settings({"progress": "off", "device": "cpu"})
        run, flag = prepared(tmp_path), StopFlag(under_launcher=True)
        with open_session(config, run, group, flag, own_options=("momentum",)) as s:
            model = s.model(net())
            made = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum, weight_decay=decay)
            optimizer = s.optimizer(made)
            batches = s.loader(TensorDataset(*points()), global_batch=8, drop_last=True)
            for _ in s.epochs(epochs):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                    break
            (chosen,) = optimizer.param_groups
            return chosen["momentum"], chosen["weight_decay"]

    assert run_ranks(1, body, 0.9, 0.25, 1) == [(0.9, 0.25)]
    assert run_ranks(1, body, 0.5, 0.0, 2) == [(0.5, 0.25)]
