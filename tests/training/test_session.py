"""A script's loop on a session: the same weights as a plain loop of one process."""

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.distributed.group import Group
from paceline.errors import UsageError
from paceline.launch.heartbeat import note
from paceline.options.fields import OptionValue
from paceline.training.session import Session
from tests.support.ranks import run_ranks
from tests.support.sessions import (
    BATCH,
    EPOCHS,
    SAMPLES,
    assert_weights,
    entropy,
    net,
    plain_loop,
    points,
    session_on,
    sgd,
    weights_of,
)

pytestmark = pytest.mark.ranks
WORLDS = [1, 2, 3]


class Pair(NamedTuple):
    inputs: Tensor
    target: Tensor


class Encoding(UserDict[str, Tensor]):
    """As a tokenizer gives it: a mapping of its own type, with attributes."""

    def __getattr__(self, name: str) -> Tensor:
        return self.data[name]


class Scores(nn.Module):
    """Takes keyword arguments and gives a dictionary, its loss included."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores: Tensor = self.net(inputs)
        return {"loss": F.cross_entropy(scores, labels), "logits": scores}


class Items(Dataset[object]):
    """A data set whose items have some form."""

    def __init__(self, form: Callable[[Tensor, Tensor], object]) -> None:
        self._inputs, self._targets = points()
        self._form = form

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> object:
        return self._form(self._inputs[index], self._targets[index])


def encode(items: list[Mapping[str, Tensor]]) -> Encoding:
    return Encoding({name: torch.stack([item[name] for item in items]) for name in items[0]})


def pair_of(batch: object) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Encoding):
        return batch.inputs, batch.labels
    if isinstance(batch, dict):
        return batch["inputs"], batch["labels"]
    if isinstance(batch, Pair):
        return batch.inputs, batch.target
    assert isinstance(batch, list | tuple)
    return batch[0], batch[1]


FORMS: dict[str, Callable[[], object]] = {
    "tensors": lambda: TensorDataset(*points()),
    "pairs": lambda: Items(lambda x, y: (x, y)),
    "three": lambda: Items(lambda x, y: (x, y, "a word")),
    "named": lambda: Items(Pair),
    "dictionaries": lambda: Items(lambda x, y: {"inputs": x, "labels": y}),
    "encodings": lambda: DataLoader(
        Items(lambda x, y: {"inputs": x, "labels": y}),
        batch_size=BATCH,
        shuffle=True,
        collate_fn=encode,
    ),
}


def script(
    group: Group,
    directory: Path,
    make: Callable[[], object],
    settings: Mapping[str, OptionValue],
) -> list[Tensor]:
    """The loop of DESIGN's example."""
    with session_on(group, directory, settings) as s:
        model = s.model(net())
        s.optimizer(sgd(model))
        batches = s.loader(make(), global_batch=BATCH)  # type: ignore[arg-type]
        for _ in s.epochs(EPOCHS):
            for batch in batches:
                inputs, targets = pair_of(batch)
                s.step(F.cross_entropy(model(inputs), targets))
        return weights_of(model)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.core_cases(3)
def test_a_script_trains_as_a_plain_loop_on_any_number_of_workers(
    form: str, tmp_path: Path
) -> None:
    expected = plain_loop()
    for world_size in WORLDS if form in ("tensors", "encodings") else [2]:
        for found in run_ranks(world_size, script, tmp_path / str(world_size), FORMS[form], {}):
            assert_weights(found, expected)


@pytest.mark.parametrize("settings", [{}, {"shards": 3}, {"max_batch_per_worker": 3}])
def test_updates_are_counted_once_they_are_done(
    settings: dict[str, OptionValue], tmp_path: Path
) -> None:
    """What comes behind an update counts it: `if s.steps_done % 100 == 0: evaluate`."""

    def body(group: Group) -> tuple[list[int], list[int]]:
        with session_on(group, tmp_path, settings) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            before, behind = set(), []
            for _ in s.epochs(EPOCHS):
                for batch in batches:
                    before.add(s.steps_done)
                    inputs, targets = pair_of(batch)
                    if s.step(F.cross_entropy(model(inputs), targets)):
                        behind.append(s.steps_done)
            assert s.steps_done == behind[-1]
            return sorted(before), behind

    steps = EPOCHS * -(-SAMPLES // BATCH)
    assert run_ranks(2, body) == [(list(range(steps)), list(range(1, steps + 1)))] * 2


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.core_cases(2)
def test_pieces_of_a_batch_add_up_to_it(world_size: int, tmp_path: Path) -> None:
    found = run_ranks(world_size, script, tmp_path, FORMS["encodings"], {"max_batch_per_worker": 3})
    assert_weights(found[0], plain_loop())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.core_cases(1)
def test_reduced_precision_comes_close(precision: str, tmp_path: Path) -> None:
    for world_size in (1, 2):
        directory = tmp_path / str(world_size)
        found = run_ranks(world_size, script, directory, FORMS["tensors"], {"precision": precision})
        assert_weights(found[0], plain_loop(), atol=0.03)


@pytest.mark.parametrize("settings", [{}, {"precision": "fp16"}, {"max_batch_per_worker": 3}])
@pytest.mark.core_cases(2)
def test_the_script_clips_gradients_itself(
    settings: Mapping[str, OptionValue], tmp_path: Path
) -> None:
    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path, settings) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(EPOCHS):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    if s.backward(F.cross_entropy(model(inputs), targets)):
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    s.update()
            return weights_of(model)

    expected = plain_loop(clip=0.1)
    tolerance = 0.01 if "precision" in settings else 1e-6
    for found in run_ranks(2, body):
        assert_weights(found, expected, atol=tolerance)


def test_a_models_own_loss_and_outputs_by_name(tmp_path: Path) -> None:
    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path) as s:
            model = s.model(Scores())
            s.optimizer(sgd(model))
            batches = s.loader(FORMS["encodings"]())  # type: ignore[arg-type]
            for _ in s.epochs(EPOCHS):
                for batch in batches:
                    assert isinstance(batch, Encoding)
                    s.step(model(**batch)["loss"])
            return weights_of(model)

    for found in run_ranks(2, body):
        assert_weights(found, plain_loop())


def gan(group: Group, directory: Path) -> list[Tensor]:
    """Generator and discriminator, each with an optimizer; the real points are a ring."""
    angles = torch.linspace(0, 6.28, SAMPLES).unsqueeze(1)
    ring = torch.cat([angles.cos(), angles.sin()], 1)
    with session_on(group, directory) as s:
        make = s.model(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)), name="make")
        judge = s.model(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)), name="judge")
        making = s.optimizer(torch.optim.Adam(make.parameters(), 1e-2))
        judging = s.optimizer(torch.optim.Adam(judge.parameters(), 1e-2))
        batches = s.loader(TensorDataset(ring), global_batch=BATCH)
        for _ in s.epochs(EPOCHS):
            for batch in batches:
                assert isinstance(batch, list)
                real: Tensor = batch[0]
                fake = make(real.flip(1))  # no random numbers: they differ between workers
                right, wrong = judge(real), judge(fake.detach())
                s.step(F.softplus(-right).mean() + F.softplus(wrong).mean(), judging)
                s.step(F.softplus(-judge(fake)).mean(), making)
        assert s.engine.snapshots.fingerprint()
        return weights_of(make, judge)


@pytest.mark.slow
def test_a_gan_learns_the_same_on_any_number_of_workers(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, gan, tmp_path / "1")
    for world_size in (2, 3):
        for found in run_ranks(world_size, gan, tmp_path / str(world_size)):
            assert_weights(found, expected, atol=1e-5)


class Squared(torch.autograd.Function):
    """A function whose derivative the script writes itself."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_custom_functions_and_frozen_and_unused_parameters(tmp_path: Path) -> None:
    def body(group: Group) -> tuple[list[Tensor], list[str]]:
        with session_on(group, tmp_path / str(group.world_size)) as s:
            told: list[str] = []
            s.engine.context.optimizer_step.report = told.append
            model = net().append(nn.Linear(2, 2))
            model[0].requires_grad_(False)
            s.model(model)
            s.optimizer(torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    scores = model[2](model[1](model[0](inputs)))
                    s.step(F.cross_entropy(Squared.apply(scores), targets))
            return weights_of(model), told

    ((expected, _),) = run_ranks(1, body)
    for found, told in run_ranks(2, body):
        assert_weights(found, expected)
        assert len(told) == 1
        assert "3.weight, 3.bias" in told[0]


@dataclass
class Sums:
    """A state of the script's own."""

    total: float = 0.0

    def state_dict(self) -> dict[str, object]:
        return {"total": self.total, "parts": (1, torch.ones(2))}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        assert isinstance(state_dict["parts"], tuple)
        self.total = float(str(state_dict["total"]))


Misuse = Callable[[Session], object]


def use_before(s: Session) -> None:
    batches = s.loader(TensorDataset(*points()), global_batch=8)
    next(iter(batches))


def use_twice(s: Session) -> None:
    batches = s.loader(TensorDataset(*points()), global_batch=8)
    for _ in s.epochs(1):
        list(batches)
        list(batches)


def model_late(s: Session) -> None:
    s.begin()
    s.model(net())


def lazy(s: Session) -> None:
    s.model(nn.Sequential(nn.Tanh(), nn.LazyLinear(3)))


def alone(s: Session) -> None:
    s.optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
    s.begin()


def steps_of_a_loader(s: Session) -> None:
    s.loader(TensorDataset(*points()), global_batch=8)
    s.steps(5)


def loader_late(s: Session) -> None:
    s.begin()
    s.prepare(DataLoader(TensorDataset(*points()), batch_size=8, shuffle=True))


def begin_twice(s: Session) -> None:
    s.begin()
    s.epochs(1)


MISUSES: dict[str, tuple[Misuse, str]] = {
    "late": (model_late, r"s.model\(...\) comes too late"),
    "loader": (loader_late, r"too late: .* One loader serves all epochs: .* set_epoch"),
    "early": (use_before, "within an epoch"),
    "twice": (use_twice, "iterated in this epoch already"),
    "lazy": (lazy, r"1\.weight has no shape before the model's first forward pass"),
    "alone": (alone, r"shape \(2,\)\): .* s\.model\(nn\.ParameterList\(\[parameter\]\)"),
    "steps": (steps_of_a_loader, r"s\.epochs\(\):`, and end both by `if s\.steps_done >="),
    "begin": (begin_twice, "begun already"),
    "name": (lambda s: (s.model(net()), s.model(net())), "a model 'model' already"),
    "kept": (lambda s: (s.keep(Sums(), name="a"), s.keep(Sums(), name="a")), "'a' is in the"),
    "batch": (
        lambda s: s.loader(TensorDataset(*points()), global_batch=9),
        "the script has global_batch=9, and the command line or the environment says 8",
    ),
    "per_worker": (
        lambda s: s.loader(TensorDataset(*points()), global_batch=9),
        "--global-batch 9 and --batch-per-worker 5 disagree",
    ),
    "epochs": (lambda s: s.epochs(9), "epochs=9, and .* says 3"),
    "prepare": (lambda s: s.prepare(net(), 3), "not a int"),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.core_cases(5)
def test_misuse_is_told(misuse: str, tmp_path: Path) -> None:
    use, message = MISUSES[misuse]

    def body(group: Group) -> None:
        settings = {"global_batch": 8, "epochs": 3} if misuse in ("batch", "epochs") else {}
        settings |= {"batch_per_worker": 5} if misuse == "per_worker" else {}
        with session_on(group, tmp_path, settings) as s, pytest.raises(UsageError, match=message):
            use(s)

    run_ranks(1, body)


@pytest.mark.slow
def test_everything_is_prepared_at_once(tmp_path: Path) -> None:
    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path / str(group.world_size)) as s:
            plain = net()
            optimizer = sgd(plain)
            data = TensorDataset(*points())
            model, same, scheduler, train, test = s.prepare(
                plain,
                optimizer,
                torch.optim.lr_scheduler.StepLR(optimizer, 1),
                DataLoader(data, batch_size=BATCH, shuffle=True),
                DataLoader(data, batch_size=20),
            )
            assert model is plain
            assert same is optimizer
            assert s.engine.context.components.schedulers == [scheduler]
            for _ in s.epochs(EPOCHS):
                for inputs, targets in train:
                    s.step(F.cross_entropy(model(inputs), targets))
                s.evaluate(lambda _: {"loss": 1.0}, test)  # type: ignore[arg-type]
            return weights_of(model)

    for world_size in WORLDS:
        for found in run_ranks(world_size, body):
            assert_weights(found, plain_loop())


class Auxiliary(nn.Module):
    """Returns two things in training, one elsewhere, and counts the samples it is trained on."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net, self.second = net(), nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scores: Tensor = self.net(inputs)
        if not self.training:
            return scores
        self.seen += len(inputs)
        return scores, self.second(scores)


def loss_of_both(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    scores, others = model(inputs)
    return F.cross_entropy(scores, targets) + 0.4 * F.cross_entropy(others, targets)


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_worker_without_samples_trains_in_training_mode_and_counts_nothing(
    world_size: int, tmp_path: Path
) -> None:
    def body(group: Group) -> tuple[list[Tensor], float]:
        with session_on(group, tmp_path) as s:
            model = s.model(Auxiliary())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(EPOCHS):
                for batch in batches:
                    s.step(loss_of_both(model, *pair_of(batch)))
            return weights_of(model), float(model.seen)

    found = run_ranks(world_size, body)
    assert_weights(found[0][0], plain_loop(make=Auxiliary, loss=loss_of_both))
    assert sum(seen for _, seen in found) == EPOCHS * SAMPLES


@pytest.mark.parametrize("world_size", WORLDS)
def test_modules_stay_in_the_mode_that_the_script_has_put_them_into(
    world_size: int, tmp_path: Path
) -> None:
    def with_frozen_norm() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        model[1].eval()
        return model

    def body(group: Group) -> tuple[list[Tensor], list[bool], Tensor]:
        with session_on(group, tmp_path) as s:
            model = s.model(with_frozen_norm())
            teacher = s.model(nn.Sequential(net(), nn.Dropout()).eval(), name="teacher")
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(EPOCHS):
                for batch in batches:
                    s.step(entropy(model, *pair_of(batch)))
            modes = [part.training for part in (model, *model, teacher, *teacher)]
            return weights_of(model), modes, model[1].get_buffer("running_mean")

    plain = plain_loop(make=with_frozen_norm)
    for weights, modes, mean in run_ranks(world_size, body):
        assert_weights(weights, plain)
        assert modes == [True, True, False, True, False, False, False]
        assert not mean.any()


def test_a_further_session_of_a_process_has_not_begun(tmp_path: Path) -> None:
    def body(group: Group) -> list[bool]:
        begun = []
        for name in ("first", "second"):
            with session_on(group, tmp_path / name) as s:
                s.optimizer(sgd(s.model(net())))
                begun.append(note.has_begun)
                next(s.epochs(1))
                begun.append(note.has_begun)
        return begun

    assert run_ranks(1, body) == [[False, True, False, True]]
