"""What is looked at after every step of a session."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, Subset, TensorDataset

from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining, JobError, UsageError
from paceline.options.fields import OptionValue
from paceline.training.session import Session
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import BATCH, pair_of, points, session_on, sgd

pytestmark = pytest.mark.ranks
Plant = Callable[[Session, nn.Module, int], None]


class Counting(nn.Module):
    """Keeps a table that no snapshot holds; counts in it if it is told to."""

    table: Tensor

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.register_buffer("table", torch.ones(5), persistent=False)
        self._counts = counts

    def forward(self, inputs: Tensor) -> Tensor:
        if self._counts and self.training:
            self.table += 0.1
        scores: Tensor = self.layer(inputs * self.table)
        return scores


def trained(
    world_size: int,
    directory: Path,
    model: Callable[[], nn.Module],
    plant: Plant = lambda s, model, step: None,
    **settings: OptionValue,
) -> list[str]:
    """Train an epoch. Returns what each rank says at its end, and after how many steps."""

    def body(group: Group) -> str:
        try:
            with session_on(group, directory, settings) as s:
                net = s.model(model())
                s.optimizer(sgd(net))
                batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
                for _ in s.epochs(1):
                    for batch in batches:
                        inputs, targets = pair_of(batch)
                        s.step(F.cross_entropy(net(inputs), targets))
                        plant(s, net, s.engine.context.progress.state.step)
        except (JobError, UsageError) as error:
            return f"{type(error).__name__} after {s.engine.context.progress.state.step}: {error}"
        return f"{s.engine.context.progress.state.step} steps"

    return run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_hidden_buffer_that_changes_is_an_error_with_shards(
    world_size: int, tmp_path: Path
) -> None:
    found = trained(world_size, tmp_path, lambda: Counting(counts=True), shards=2)
    assert all("JobError after 1: the buffer table changes" in text for text in found)


def test_without_shards_it_is_left_alone(tmp_path: Path) -> None:
    assert trained(1, tmp_path, lambda: Counting(counts=True)) == ["7 steps"]


def test_a_table_that_stays_is_none(tmp_path: Path) -> None:
    assert trained(2, tmp_path, lambda: Counting(counts=False), shards=2) == ["7 steps"] * 2


def test_threads_that_the_script_changes_are_refused_with_shards(tmp_path: Path) -> None:
    def more_threads(s: Session, model: nn.Module, step: int) -> None:
        torch.set_num_threads(2)

    (found,) = trained(1, tmp_path, lambda: nn.Linear(5, 2), more_threads, shards=2)
    assert "UsageError after 1: the script has changed" in found
    assert "threads: was 1, is 2" in found
    assert trained(1, tmp_path / "free", lambda: nn.Linear(5, 2), more_threads) == ["7 steps"]


@pytest.mark.parametrize(
    ("settings", "after"),
    [({}, None), ({"check_every": 4}, 4), ({"shards": 2, "check_every": 0}, None)],
    ids=str,
)
@pytest.mark.core_cases(2)
def test_weights_that_drift_are_found_at_the_next_look(
    settings: dict[str, OptionValue], after: int | None, tmp_path: Path
) -> None:
    def on_rank_1(s: Session, model: nn.Module, step: int) -> None:
        if s.rank == 1 and step == 2:
            with torch.no_grad():
                next(model.parameters()).add_(1e-3)

    found = trained(2, tmp_path, lambda: nn.Linear(5, 2), on_rank_1, **settings)
    if after is None:
        assert found == ["7 steps"] * 2
    else:
        assert all(f"JobError after {after}: after step {after} rank 0" in text for text in found)


def test_rates_that_differ_are_found_before_the_first_step(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        with session_on(group, tmp_path, {"check_every": 100}) as s:
            net = s.model(nn.Linear(5, 2))
            s.optimizer(torch.optim.SGD(net.parameters(), lr=0.1 * s.rank))
            s.loader(TensorDataset(*points()), global_batch=BATCH)
            with pytest.raises(JobError) as error:
                s.begin()
            return str(error.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "at the start rank 0 on " in first
    assert "learning rate differs" in first


def noisy(s: Session, model: nn.Module, step: int) -> None:
    """Change the weights by numbers that each rank draws for itself."""
    with torch.no_grad():
        next(model.parameters()).add_(torch.randn(()), alpha=1e-3)


def test_weights_that_drift_are_told_where_nobody_has_asked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert trained(2, tmp_path, lambda: nn.Linear(5, 2), noisy) == ["7 steps"] * 2
    assert capfd.readouterr().out.count("after step 7 rank 0 on ") == 1


def test_rates_that_come_to_differ_are_an_error_where_nobody_has_asked(tmp_path: Path) -> None:
    """As those of a schedule that follows each worker's own figure."""

    def on_rank_1(s: Session, model: nn.Module, step: int) -> None:
        if s.rank == 1 and step == 6:
            s.engine.context.components.optimizers[0].param_groups[0]["lr"] *= 0.1

    found = trained(2, tmp_path, lambda: nn.Linear(5, 2), on_rank_1)
    assert all("JobError after 7: after step 7 rank 0" in text for text in found)
    assert all("learning rate differs" in text for text in found)


def left_by(
    world_size: int, directory: Path, leaves: Callable[[Session, int], bool], *, keeps: bool = False
) -> list[str]:
    """Train up to three epochs, one more each time; gives what each rank says at its end."""

    def body(group: Group) -> str:
        try:
            with session_on(group, directory) as s:
                net = s.model(nn.Linear(5, 2))
                s.optimizer(sgd(net))
                if keeps:
                    s.keep(best=0.0)
                batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
                for epoch in s.epochs(3):
                    for batch in batches:
                        inputs, targets = pair_of(batch)
                        s.step(F.cross_entropy(net(inputs), targets))
                    if leaves(s, epoch):
                        break
        except JobError as error:
            return str(error)
        return ""

    return run_ranks(world_size, body)


def test_workers_that_leave_their_loop_apart_are_an_error(tmp_path: Path) -> None:
    """As by early stopping by a figure of each worker's own: the others would wait for ever."""
    first, second = left_by(2, tmp_path, lambda s, epoch: s.rank == 1 and epoch == 1)
    assert first == second
    assert first.startswith("rank 1 on ")
    assert " has left its loop after epoch 2, and rank 0 on " in first
    assert left_by(2, tmp_path / "alike", lambda s, epoch: epoch == 1) == [""] * 2


@pytest.mark.parametrize(
    ("leaves", "keeps", "told"),
    [
        (lambda s, epoch: True, False, True),
        (lambda s, epoch: True, True, False),
        (lambda s, epoch: s.steps_done > 0, False, False),
        (lambda s, epoch: False, False, False),
    ],
    ids=["a plain variable", "kept", "steps_done", "not left"],
)
def test_a_resumed_loop_that_is_left_by_what_began_anew_is_told(
    leaves: Callable[[Session, int], bool],
    keeps: bool,
    told: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    left_by(1, tmp_path, lambda s, epoch: True, keeps=keeps)
    assert "began anew" not in capfd.readouterr().out
    left_by(1, tmp_path, leaves, keeps=keeps)
    assert ("began anew" in capfd.readouterr().out) == told


class Turning(IterableDataset[tuple[Tensor, Tensor]]):
    """Begins each epoch elsewhere: by its own count, or as it is told."""

    def __init__(self, *, draws: bool = False) -> None:
        self.epoch = 0
        self._draws = draws

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        inputs, targets = points()
        for place in range(len(inputs)):
            at = (place + 7 * epoch) % len(inputs)
            noise = torch.randn(5) if self._draws else torch.zeros(5)
            yield inputs[at] + noise, targets[at]


class Told(Turning):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize(
    ("make", "stop", "told"),
    [
        (Turning, 10, "read again after a resume it gives other samples"),
        (Turning, 14, "resumed, it begins epoch 3 with the samples of its first epoch"),
        (Told, 10, ""),
        (Told, 14, ""),
        (lambda: Told(draws=True), 10, "read again after a resume it gives other samples"),
    ],
    ids=["within an epoch", "between epochs", "told within", "told between", "draws"],
)
def test_a_stream_that_gives_other_samples_once_resumed_is_told(
    make: Callable[[], Turning],
    stop: int,
    told: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def body(group: Group, last: int | None) -> None:
        flag = StopFlag(under_launcher=True)
        with suppress(InterruptedTraining), session_on(group, tmp_path, flag=flag) as s:
            net = s.model(nn.Sequential(nn.Dropout(0.1), nn.Linear(5, 2)))
            s.optimizer(sgd(net))
            batches = s.loader(make(), global_batch=BATCH)
            for _ in s.epochs(3):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    s.step(F.cross_entropy(net(inputs), targets))
                    if s.engine.context.progress.state.step + 1 == last != 14:
                        flag.name = "SIGTERM"
                if s.engine.context.progress.state.step == last:
                    flag.name = "SIGTERM"
        s.engine.snapshots.flush()

    run_ranks(1, body, stop)
    assert "resume" not in capfd.readouterr().out
    run_ranks(1, body, None)
    out = capfd.readouterr().out
    assert told in out
    assert bool(told) == ("uninterrupted training" in out)


def judge(net: nn.Module, batch: object) -> dict[str, Tensor]:
    inputs, targets = pair_of(batch)
    return {"hits": net(inputs).argmax(1) == targets}


@pytest.mark.parametrize(
    ("again", "trains", "refused"),
    [
        (range(20), True, False),
        (range(1, 21), True, True),
        (range(24), True, False),
        (None, True, False),
        (range(1, 21), False, False),
    ],
    ids=["the same", "drawn anew", "others on purpose", "no subset", "to evaluate on alone"],
)
def test_a_subset_that_has_other_samples_once_resumed_is_an_error(
    again: range | None, trains: bool, refused: bool, tmp_path: Path
) -> None:
    def body(group: Group, picked: range | None, epochs: int) -> str:
        with session_on(group, tmp_path) as s:
            net = s.model(nn.Linear(5, 2))
            s.optimizer(sgd(net))
            every = TensorDataset(*points(24))
            train = Subset(every, range(20)) if trains else every
            batches = s.loader(train, global_batch=BATCH)
            judged = s.eval_loader(every if picked is None else Subset(every, picked))
            try:
                for _ in s.epochs(epochs):
                    for inputs, targets in map(pair_of, batches):
                        s.step(F.cross_entropy(net(inputs), targets))
                    s.evaluate(partial(judge, net), judged)
            except JobError as error:
                return str(error)
            s.engine.snapshots.flush()
        return ""

    assert run_ranks(1, body, range(20), 1) == [""]
    (told,) = run_ranks(1, body, again, 2)
    assert ("other samples in a Subset" in told and "random_split" in told) == refused
