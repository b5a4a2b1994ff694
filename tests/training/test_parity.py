"""Oracles: the same as plain PyTorch DDP, and the same on any number of workers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from paceline.data.memory import MemorySource, TensorData
from paceline.data.order import epoch_order
from paceline.distributed.group import Group
from paceline.errors import UsageError
from paceline.options.fields import OptionValue
from paceline.training.job import Job
from paceline.training.rng import seed_everything
from tests.support.ranks import run_ranks
from tests.support.tiers import slow
from tests.support.trainings import (
    Outcome,
    configure,
    noisy_job,
    noisy_net,
    pictures,
    plain_job,
    plain_net,
    run_training_on,
)

pytestmark = pytest.mark.ranks

EPOCHS, BATCH, SAMPLES = 5, 16, 160
"""10 steps an epoch: 50 in all."""


def inputs_of(data: TensorData) -> tuple[Tensor, Tensor]:
    (batch,) = MemorySource(data).eval_batches(0, 1, data.num_samples)
    return batch.inputs, batch.targets


def without_dropout() -> nn.Module:
    net = nn.Sequential(*(m for m in noisy_net().children() if not isinstance(m, nn.Dropout)))
    # BatchNorm takes the convolution's bias out again: its gradient is rounding noise, which Adam
    # would blow up to full steps.
    net[0].register_parameter("bias", None)
    return net


def even_job(net: Callable[[], nn.Module] = plain_net) -> Job:
    return Job(model=net(), train=pictures(SAMPLES), validation=pictures(13, seed=2))


def loop_by_hand(
    group: Group,
    net: Callable[[], nn.Module],
    make: Callable[..., torch.optim.Optimizer],
    keywords: dict[str, object],
) -> list[Tensor]:
    """Train as the DDP tutorial does, on the same batches of indices."""
    seed_everything(0)
    model = net()
    data = pictures(SAMPLES)
    inputs, targets = inputs_of(data)
    module: nn.Module = model if group.world_size == 1 else DistributedDataParallel(model)
    optimizer = make(module.parameters(), **keywords)
    for epoch in range(EPOCHS):
        order = torch.from_numpy(epoch_order(SAMPLES, 0, epoch))
        for picked in order.split(BATCH):
            mine = picked.chunk(group.world_size)[group.rank]
            optimizer.zero_grad()
            F.cross_entropy(module(inputs[mine]), targets[mine]).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, object]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 0.002}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
}


@pytest.mark.parametrize(
    ("optimizer", "world_size"),
    [("sgd", 1), ("sgd", 2), slow("sgd", 4), ("adam", 2), slow("adadelta", 2)],
)
@pytest.mark.parametrize("net", [plain_net, without_dropout])
@pytest.mark.core_cases(1)
def test_parameters_equal_plain_ddp_after_50_steps(
    optimizer: str, net: Callable[[], nn.Module], world_size: int, tmp_path: Path
) -> None:
    make, keywords = CASES[optimizer]
    settings: dict[str, OptionValue] = {
        "epochs": EPOCHS,
        "global_batch": BATCH,
        "optimizer": optimizer,
        **keywords,  # type: ignore[dict-item]  # numbers and booleans
    }

    def body(group: Group) -> float:
        expected = flat(loop_by_hand(group, net, make, keywords))
        outcome = run_training_on(group, tmp_path, lambda: even_job(net), configure(**settings))
        assert outcome.step == 50
        return float((flat(outcome.parameters) - expected).norm() / expected.norm())

    assert max(run_ranks(world_size, body)) <= 1e-6


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def curve(outcomes: list[Outcome]) -> tuple[list[float], list[float]]:
    """The running training loss after every step, and the validation losses."""
    return outcomes[0].losses, [float(row["val_loss"]) for row in outcomes[0].rows]


def test_any_number_of_workers_gives_the_same_loss_curve(tmp_path: Path) -> None:
    # 49 samples in batches of 8: the last has one sample, for the first worker alone.
    def train(world_size: int, **settings: OptionValue) -> list[Outcome]:
        config = configure(momentum=0.9, epochs=4, **settings)
        name = f"{world_size}-{len(settings)}"
        return run_ranks(
            world_size, run_training_on, tmp_path / name, lambda: plain_job(49), config
        )

    alone = train(1)
    losses, validation = curve(alone)
    assert len(losses) == 4 * 7
    others = [train(world_size) for world_size in (2, 3, 4)]
    others += [train(world_size, max_batch_per_worker=3) for world_size in (1, 2)]
    for outcomes in others:
        assert outcomes[-1].trained[6] == (0, [] if len(outcomes) > 1 else alone[0].trained[6][1])
        theirs, their_validation = curve(outcomes)
        assert theirs == pytest.approx(losses, rel=1e-5)
        assert their_validation == pytest.approx(validation, rel=1e-5)
        assert [row["val_accuracy"] for row in outcomes[0].rows] == [
            row["val_accuracy"] for row in alone[0].rows
        ]
        assert [o.summary["weights_sha256"] for o in outcomes] == [
            outcomes[0].summary["weights_sha256"]
        ] * len(outcomes)


@pytest.mark.parametrize("samples", [17, 50, 53])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.core_cases(2)
def test_every_sample_is_trained_on_and_evaluated_once(
    world_size: int, samples: int, tmp_path: Path
) -> None:
    config = configure(global_batch=7, epochs=2)
    outcomes = run_ranks(
        world_size, run_training_on, tmp_path, lambda: plain_job(samples, 11), config
    )
    for epoch in range(2):
        seen = [i for o in outcomes for e, indices in o.trained if e == epoch for i in indices]
        assert sorted(seen) == list(range(samples))
        evaluated = [i for o in outcomes for i in o.evaluated[epoch]]
        assert evaluated == list(range(11))
    assert outcomes[0].summary["samples_seen"] == 2 * samples
    assert outcomes[0].summary["val_samples"] == 11


def test_more_workers_than_validation_samples(tmp_path: Path) -> None:
    outcomes = run_ranks(
        3, run_training_on, tmp_path, lambda: plain_job(20, 2), configure(epochs=1)
    )
    assert [o.evaluated for o in outcomes] == [[[0]], [[1]], [[]]]


def test_drop_last_leaves_out_the_short_batch(tmp_path: Path) -> None:
    config = configure(epochs=1, drop_last=True)
    outcomes = run_ranks(2, run_training_on, tmp_path, plain_job, config)
    seen = [i for o in outcomes for _, indices in o.trained for i in indices]
    assert len(seen) == len(set(seen)) == 48
    assert outcomes[0].summary["samples_seen"] == 48


@pytest.mark.slow
def test_ranks_agree_on_their_parameters(tmp_path: Path) -> None:
    def body(group: Group) -> bool:
        config = configure(optimizer="lamb", clip_norm=0.5, precision="bf16")
        outcome = run_training_on(group, tmp_path, lambda: even_job(noisy_net), config)
        for own in outcome.parameters:
            others = own.clone()
            dist.broadcast(others, src=0)
            assert torch.equal(own, others)
        return True

    assert run_ranks(3, body) == [True] * 3


def batchnorm_job(samples: int) -> Job:
    return Job(model=without_dropout(), train=pictures(samples), validation=pictures(13, seed=2))


@pytest.mark.slow
def test_synchronised_batchnorm_gives_the_loss_curve_of_one_worker(tmp_path: Path) -> None:
    # 50 samples: the last batch of 2 would leave the third worker out, so drop it.
    config = configure(sync_batchnorm=True, drop_last=True, momentum=0.9)
    curves = [
        curve(run_ranks(n, run_training_on, tmp_path / str(n), lambda: batchnorm_job(50), config))
        for n in (1, 2, 3)
    ]
    for losses, validation in curves[1:]:
        assert losses == pytest.approx(curves[0][0], rel=1e-5)
        assert validation == pytest.approx(curves[0][1], rel=1e-5)


def test_synchronised_batchnorm_needs_a_sample_on_every_worker(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with pytest.raises(UsageError, match=r"2 samples for 3 workers.*--drop-last"):
            run_training_on(group, tmp_path, noisy_job, configure(sync_batchnorm=True))

    run_ranks(3, body)
