"""Reproducible mode: the same bits on any number of workers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, StepLR

from paceline.distributed.group import Group
from paceline.errors import UsageError
from paceline.options.fields import OptionValue
from paceline.training.config import TrainConfig
from paceline.training.session import Session
from tests.support.ranks import RankError, run_ranks
from tests.support.sessions import pair_of, session_on
from tests.support.tiers import slow
from tests.support.trainings import (
    MakeJob,
    Outcome,
    StopAt,
    configure,
    listed_job,
    noisy_job,
    pictures,
    run_training_on,
)

pytestmark = pytest.mark.ranks

Bits = tuple[object, object, list[dict[str, str]]]

SGD: dict[str, OptionValue] = {"optimizer": "sgd", "momentum": 0.9, "nesterov": True}
HARD: dict[str, OptionValue] = SGD | {"clip_norm": 0.5, "warmup_epochs": 1, "schedule": "cosine"}
"""Momentum, clipping and warm-up, beside the BatchNorm, Dropout, augmentation and short last batch
that the job itself has."""


def trained(
    directory: Path,
    world_size: int,
    config: TrainConfig,
    stop: StopAt | None = None,
    job: MakeJob = noisy_job,
) -> list[Outcome]:
    return run_ranks(world_size, run_training_on, directory, job, config, stop)


def bits(outcomes: Sequence[Outcome]) -> Bits:
    """What has to be the same to the last bit."""
    (first, *others) = outcomes
    for other in others:
        assert all(map(torch.equal, first.parameters, other.parameters))
    return first.summary["weights_sha256"], first.summary["state_sha256"], first.rows


@pytest.mark.parametrize(
    ("shards", "batch"),
    [slow(8, 8), slow(8, 12), slow(16, 16), (5, 8)],  # 5 shards of 8: shares of two sizes
)
@pytest.mark.slow
def test_whole_trainings_have_the_same_bits_on_any_number_of_workers(
    tmp_path: Path, shards: int, batch: int
) -> None:
    config = configure(shards=shards, global_batch=batch, **HARD)
    worlds = [n for n in (1, 2, 3, 4, 5, 8) if n <= shards]
    found = [bits(trained(tmp_path / str(n), n, config)) for n in worlds]
    assert found == [found[0]] * len(worlds)


@pytest.mark.slow
def test_without_shards_they_differ(tmp_path: Path) -> None:
    one, two = (bits(trained(tmp_path / str(n), n, configure(**HARD))) for n in (1, 2))
    assert one[0] != two[0]


@pytest.mark.parametrize(
    "settings",
    [
        slow({"optimizer": "adamw", "weight_decay": 0.1}),
        slow({"optimizer": "novograd"}),
        slow({"optimizer": "lamb"}),
        slow({**HARD, "precision": "bf16"}),
        {**HARD, "global_batch": 24, "max_batch_per_worker": 2},
        {**HARD, "label_smoothing": 0.1, "drop_last": True},
        slow({**HARD, "target_accuracy": 0.4, "epochs": 8}),
    ],
    ids=["adamw", "novograd", "lamb", "bf16", "accumulation", "drop-last", "target"],
)
@pytest.mark.slow
def test_every_kind_of_training_has_them(tmp_path: Path, settings: dict[str, OptionValue]) -> None:
    config = configure(shards=8, **settings)
    found = [bits(trained(tmp_path / str(n), n, config)) for n in (1, 3, 8)]
    assert found == [found[0]] * 3


@pytest.mark.slow
def test_samples_from_a_loader_have_them(tmp_path: Path) -> None:
    config = configure(shards=4, loader_workers=1, epochs=2, **SGD)
    found = [bits(trained(tmp_path / str(n), n, config, job=listed_job)) for n in (1, 2, 3)]
    assert found == [found[0]] * 3


@pytest.mark.slow
def test_stopped_and_gone_on_with_on_other_numbers_of_workers(tmp_path: Path) -> None:
    config = configure(shards=8, **HARD)
    undisturbed = bits(trained(tmp_path / "one", 1, config))
    run = tmp_path / "elastic"
    # Seven steps an epoch: three stops within the first, one in the short last step of the second.
    stops = [
        (4, StopAt(rank=3, forward=4)),
        (3, StopAt(rank=0, forward=3)),
        (1, StopAt(rank=0, forward=9)),
        (8, StopAt(rank=1, forward=8)),
        (5, None),
    ]
    positions = []
    for world_size, stop in stops:
        outcomes = trained(run, world_size, config, stop)
        positions.append((outcomes[0].epoch, outcomes[0].step_in_epoch))
    assert len(set(positions)) == len(positions), positions
    assert positions[0] < positions[1] < positions[2] < (1, 0)
    assert bits(outcomes) == undisturbed


@pytest.mark.slow
def test_as_many_shards_as_workers_train_as_plain_ddp_does(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", 2, configure(**SGD))
    ordered = trained(tmp_path / "ordered", 2, configure(shards=2, **SGD))
    torch.testing.assert_close(ordered[0].parameters, plain[0].parameters, rtol=1e-4, atol=1e-5)
    assert [b for o in ordered for b in o.trained] == [b for o in plain for b in o.trained]


@pytest.mark.slow
def test_a_script_of_ones_own_has_them(tmp_path: Path) -> None:
    def made(group: Group, directory: Path) -> tuple[object, list[bool]]:
        images = pictures(20)
        data = torch.utils.data.TensorDataset(images.images.float() / 255, images.labels)
        updates: list[bool] = []
        with session_on(group, directory, {"shards": 4}) as s:
            model = s.model(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3)))
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            batches = s.loader(data, global_batch=8)
            for _ in s.epochs(2):
                for x, y in map(pair_of, batches):
                    updates.append(s.step(F.cross_entropy(model(x), y)))
            return s.engine.snapshots.fingerprint(), updates

    results = {n: run_ranks(n, made, tmp_path / str(n)) for n in (1, 2, 4)}
    assert len({weights for rows in results.values() for weights, _ in rows}) == 1
    ((_, updates),) = results[1]
    assert updates == [False, False, False, True] * 6  # 3 steps an epoch, 4 shards each
    assert [u for _, u in results[4]] == [[True] * 6] * 4


class MixedData(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that are mixed at random when a batch is made of them."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((36,), index / 22), torch.tensor(index % 3)


def mixing(items: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    inputs, targets = map(torch.stack, zip(*items, strict=True))
    return [inputs + torch.rand(()) * inputs.roll(1, 0), targets]


@pytest.mark.parametrize("readers", [0, 1])
@pytest.mark.slow
def test_random_collation_is_a_shards_own(tmp_path: Path, readers: int) -> None:
    def body(group: Group, directory: Path) -> object:
        data = torch.utils.data.DataLoader(
            MixedData(), batch_size=8, shuffle=True, collate_fn=mixing, num_workers=readers
        )
        with session_on(group, directory, {"shards": 4}) as s:
            model = s.model(nn.Linear(36, 3))
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = s.loader(data)
            for _ in s.epochs(2):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
            return s.engine.snapshots.fingerprint()

    found = {w for n in (1, 2, 3) for w in run_ranks(n, body, tmp_path / str(n))}
    assert len(found) == 1


class Holding(nn.Module):
    """Buffers of kinds that no float holds, and one BatchNorm under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(36, 3)
        self.norm = nn.BatchNorm1d(3)
        self.same = self.norm
        self.register_buffer("large", torch.tensor([2**63 - 1, 2**53 + 1, -5]))
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([0.5, 1.0])))
        self.register_buffer("flag", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.line(x))
        return out


@pytest.mark.slow
def test_buffers_of_all_kinds_stay_what_they_are(tmp_path: Path) -> None:
    def body(group: Group, directory: Path) -> tuple[object, bool]:
        images = pictures(16)
        data = torch.utils.data.TensorDataset(images.images.float().flatten(1) / 255, images.labels)
        with session_on(group, directory, {"shards": 4}) as s:
            model = s.model(Holding())
            before = {n: b.clone() for n, b in model.named_buffers() if n in "large turns flag"}
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = s.loader(data, global_batch=8)
            for _ in s.epochs(2):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                s.snapshot(must=True)
            with s.engine.evaluation():
                held = dict(model.named_buffers())
                kept = all(torch.equal(held[n], b) for n, b in before.items())
            return s.engine.snapshots.fingerprint(), kept

    found = {n: run_ranks(n, body, tmp_path / str(n)) for n in (1, 2, 4)}
    assert len({weights for rows in found.values() for weights, _ in rows}) == 1
    assert all(kept for rows in found.values() for _, kept in rows)
    # Gone on with from a snapshot, nothing is trained any more and everything is the same.
    assert run_ranks(2, body, tmp_path / "4") == found[2]


BETWEEN: dict[str, Callable[[Session, LRScheduler], object]] = {
    "schedule": lambda _, schedule: schedule.step(),
    "snapshot": lambda s, _: s.snapshot(),
    "sum": lambda s, _: s.sum(1),
}


def _script(group: Group, directory: Path, fault: str) -> None:
    images = pictures(20)
    data = torch.utils.data.TensorDataset(images.images.float() / 255, images.labels)
    with session_on(group, directory, {"shards": 4}) as s:
        model = s.model(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)))
        s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if fault == "two optimizers":
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        (optimizer, *_) = s.engine.context.components.optimizers
        schedule = s.scheduler(StepLR(optimizer, 1000))
        batches = s.loader(data, global_batch=8)
        if fault == "two loaders":
            s.loader(data, global_batch=8)
        seen = 0
        for _ in s.epochs(1):
            for x, y in map(pair_of, batches):
                if fault == "left out" and s.engine.step.batch and s.engine.step.batch.part == 1:
                    continue
                loss = F.cross_entropy(model(x), y)
                if fault == "twice":
                    s.backward(loss)
                    loss = F.cross_entropy(model(x), y)
                s.step(loss)
                seen += 1
                if fault in BETWEEN and seen == 5:  # of 4 shards a step, or 2
                    BETWEEN[fault](s, schedule)
                if fault == "left early" and seen == 3:
                    break
        if fault == "outside":
            s.step(model(torch.zeros(2, 36)).sum())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("two optimizers", "can't be combined with several optimizers"),
        ("left out", "a batch had no s.step"),
        ("twice", "a second backward pass about the same shard"),
        ("two loaders", "can't be combined with a second training loader"),
        ("schedule", "if s.step.loss.: scheduler.step"),
        ("snapshot", "s.snapshot.. between two shards"),
        ("sum", "s.sum.* between two shards"),
        ("left early", "break between two shards"),
        ("outside", "a step is about a batch of the training loader"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.core_cases(8)
def test_what_would_break_it_is_refused(
    tmp_path: Path, fault: str, said: str, world_size: int
) -> None:
    with pytest.raises(RankError, match=said):
        run_ranks(world_size, _script, tmp_path, fault)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"shards": 8, "batch_per_worker": 4}, "--shards needs --global-batch"),
        ({"shards": 8, "global_batch": 4}, "8 shards are more than the 4 samples"),
        ({"shards": 0}, "shards is 0"),
    ],
)
def test_options_that_contradict(settings: dict[str, OptionValue], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainConfig.from_settings(settings)
