"""Sessions for the body of a test on several ranks: a script's `with paceline.session()`."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.order import epoch_order
from paceline.distributed.group import Group
from paceline.options.fields import OptionValue
from paceline.training import status_exchange
from paceline.training.config import TrainConfig
from paceline.training.rng import seed_everything
from paceline.training.session import Session
from paceline.training.setup import open_session
from paceline.training.status_exchange import StopFlag
from tests.support.trainings import prepared

SAMPLES, BATCH, EPOCHS = 50, 8, 2
"""7 steps an epoch; the last has 2 samples: on 3 workers one of them has none."""


@contextmanager
def session_on(
    group: Group,
    directory: Path,
    settings: Mapping[str, OptionValue] | None = None,
    flag: StopFlag | None = None,
) -> Iterator[Session]:
    """Open a session on a group of ranks, which exchange their status after every step.

    Args:
        group: The ranks; each a forked process, so that what is changed here ends with it.
        directory: The run directory.
        settings: Options, as if given on the command line.
        flag: Stands for a signal.
    """
    status_exchange._EVERY_S = 0.0
    os.fsync = _no_wait  # type: ignore[assignment]  # the disk may take as long as it likes
    usual: dict[str, OptionValue] = {"progress": "off", "device": "cpu", "loader_workers": 0}
    config = TrainConfig.from_settings({**usual, **(settings or {})})
    seed_everything(config.loop.seed)
    given = frozenset(settings or ())
    stop = flag or StopFlag(under_launcher=True)
    with open_session(config, prepared(directory), group, stop, given=given) as session:
        yield session
        session.engine.close_epoch()


def weights_of(*models: nn.Module) -> list[Tensor]:
    """Copy all parameters."""
    return [p.detach().clone() for model in models for p in model.parameters()]


def assert_weights(found: list[Tensor], expected: list[Tensor], atol: float = 1e-6) -> None:
    """Compare all parameters."""
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


def first_of(batch: object) -> Tensor:
    assert isinstance(batch, list)
    found: Tensor = batch[0]
    return found


def pair_of(batch: object) -> tuple[Tensor, Tensor]:
    """Take a batch of pairs apart."""
    assert isinstance(batch, list | tuple)
    return batch[0], batch[1]


def points(samples: int = SAMPLES, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 5, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def entropy(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def plain_loop(
    *,
    shuffle: bool = True,
    clip: float | None = None,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = entropy,
    rate: Callable[[int], float] | None = None,
    make: Callable[[], nn.Module] = net,
) -> list[Tensor]:
    """What one process without Paceline does on the same batches."""
    seed_everything(0)
    model = make()
    optimizer = sgd(model)
    inputs, targets = points()
    step = 0
    for epoch in range(EPOCHS):
        order = torch.from_numpy(epoch_order(SAMPLES, 0, epoch)) if shuffle else torch.arange(50)
        for picked in order.split(BATCH):
            optimizer.zero_grad()
            if rate is not None:
                optimizer.param_groups[0]["lr"] = rate(step)
            loss(model, inputs[picked], targets[picked]).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            step += 1
    return weights_of(model)


def _no_wait(descriptor: object) -> None:
    """Stand for fsync where no power cut is tested."""
