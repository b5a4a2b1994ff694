"""What a worker's witness writes down, of Paceline's session and of a plain script."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it: once here rather than in a test
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.batch import Batch
from paceline.verify.events import (
    Backward,
    Began,
    Drawn,
    Drew,
    Evaluated,
    Event,
    EventWriter,
    FileRead,
    Loaded,
    ModelBuilt,
    Monitored,
    Moved,
    Normalised,
    PassBegun,
    PassEnded,
    Printed,
    Scaled,
    Stepped,
    Wrote,
    read_events,
)
from paceline.verify.observing.observer import Observer
from paceline.verify.observing.script_hooks import watched
from paceline.verify.observing.session import SessionWatch
from paceline.verify.source_lines import code_at
from paceline.verify.trial import EnoughSeenError, Trial


@pytest.fixture
def observer(tmp_path: Path) -> Observer:
    trial = Trial(request="", records=str(tmp_path), steps=2)
    return Observer(trial, 0, EventWriter(tmp_path / "rank-0.jsonl"))


def noted(observer: Observer, *kinds: type[Event]) -> list[Event]:
    return [e for e in read_events(observer.writer.path) if isinstance(e, kinds)]


def test_what_is_printed_is_noted_on_what_looks_like_the_real_stream(
    observer: Observer, capfd: pytest.CaptureFixture[str]
) -> None:
    real = sys.stdout
    with watched(observer):
        assert sys.stdout is not real
        assert sys.stdout.fileno() == real.fileno()
        assert (sys.stdout.encoding, sys.stdout.isatty()) == (real.encoding, real.isatty())
        sys.stdout.buffer.write(b"bytes\n")
        print("noted", flush=True)
    (noted,) = (e for e in read_events(observer.writer.path) if isinstance(e, Printed))
    assert noted.line == "noted"
    assert code_at(noted.at) == 'print("noted", flush=True)'
    assert capfd.readouterr().out == "bytes\n"


def test_a_session_tells_it_all(observer: Observer) -> None:
    watch, batch = SessionWatch(observer), Batch(torch.ones(2, 2), 2, 4, np.array([3, 5]))
    watch.begin({"model": nn.Linear(2, 1)})
    watch.batch(0, batch)
    watch.backward(torch.tensor(0.5), 0.25)
    handed, drawn, began, backward = read_events(observer.writer.path)
    assert isinstance(began, Began)
    assert isinstance(handed, ModelBuilt)
    assert handed.by == "session"
    assert isinstance(drawn, Drawn)
    assert (drawn.samples, drawn.trains) == (("3", "5"), True)
    assert backward == Backward(0.5, 0.25, fed=((-1, 0),))
    assert len(list(watch.epoch(1, iter([batch] * 3)))) == 2
    assert noted(observer, PassEnded) == [PassEnded(-1, 1, True)]
    with pytest.raises(EnoughSeenError):
        watch.batch(2, batch)


def test_a_plain_script_is_seen_from_outside(observer: Observer) -> None:
    data = TensorDataset(torch.randn(6, 2), torch.randn(6, 1))
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(observer):
        loader = DataLoader(data, batch_size=2)
        judging = DataLoader(data, batch_size=3)
        print("hidden")
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        for inputs, _ in judging:
            model(inputs)
    events = read_events(observer.writer.path)
    steps = [e for e in events if isinstance(e, Stepped)]
    assert len(steps) == 2  # cut off after so many
    assert steps[0].names == ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    assert [len(s.before) for s in steps] == [6, 0]
    assert [e.module for e in events if isinstance(e, Normalised)] == ["1"]
    assert [e.by for e in events if isinstance(e, Drew)] == ["dropout", "dropout"]
    ended = [e for e in events if isinstance(e, PassEnded)]
    assert [e.is_cut for e in ended] == [True, False]
    assert ended[0].loader != ended[1].loader
    assert [set(e.buffers) for e in events if isinstance(e, Evaluated)] == [
        {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    ]
    drawn = [e.samples for e in events if isinstance(e, Drawn)]
    assert drawn == [("0", "1"), ("2", "3"), ("0", "1", "2"), ("3", "4", "5")]


def test_hooks_are_taken_off_again(observer: Observer) -> None:
    before = (torch.Tensor.backward, DataLoader.__iter__, torch.save, nn.functional.dropout)
    with watched(observer):
        assert torch.Tensor.backward is not before[0]
    assert (torch.Tensor.backward, DataLoader.__iter__, torch.save, nn.functional.dropout) == before
    model = nn.Linear(1, 1)
    model(torch.ones(1)).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    assert read_events(observer.writer.path) == []


def test_the_third_epoch_is_enough(observer: Observer) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    epochs = 0

    def train() -> None:
        nonlocal epochs
        while True:
            for (inputs,) in DataLoader(TensorDataset(torch.randn(2, 1)), batch_size=2):
                model(inputs).sum().backward()
                optimizer.step()
            epochs += 1

    with watched(observer), pytest.raises(EnoughSeenError):
        train()
    assert epochs == 2
    assert len(noted(observer, PassBegun)) == len(noted(observer, Drawn)) == 2


def test_loaders_that_one_line_makes_are_told_apart(observer: Observer) -> None:
    """A library makes all of a script's loaders in one place; a script may, anew in every epoch."""
    data = TensorDataset(torch.randn(4, 1))

    def make() -> DataLoader[object]:
        return DataLoader(data, batch_size=2)

    with watched(observer):
        pairs = []
        for _ in range(2):
            pairs.append([make() for _ in range(2)])
            for loader in pairs[-1]:
                list(loader)
    begun = [e.loader for e in read_events(observer.writer.path) if isinstance(e, PassBegun)]
    assert begun[0] != begun[1]
    assert begun[:2] == begun[2:]


class Sharing(torch.optim.Optimizer):
    """Has another optimizer take its step, as ZeroRedundancyOptimizer does for a rank's part."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.part = torch.optim.SGD(parameters[:1], lr=0.5)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.part.step()


def test_an_optimizer_within_another_one_takes_no_step_of_its_own(observer: Observer) -> None:
    model = nn.Linear(2, 1)
    with watched(observer):
        optimizer = Sharing(list(model.parameters()))
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    steps = [e for e in read_events(observer.writer.path) if isinstance(e, Stepped)]
    assert [len(step.weights) for step in steps] == [2, 2]
    assert {step.optimizer for step in steps} == {0}


def test_figures_that_a_schedule_follows_are_noted(observer: Observer) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with watched(observer):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        plateau.step(0.5)
        plateau.step(metrics=torch.tensor(0.25))
    noted = [e for e in read_events(observer.writer.path) if isinstance(e, Monitored)]
    assert noted == [Monitored(0.5), Monitored(0.25)]


def test_a_backward_pass_says_what_it_was_fed_and_what_it_adds_to(observer: Observer) -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other)]
    with watched(observer):
        loader = DataLoader(TensorDataset(torch.tensor([[1.0], [torch.nan]])))
        for (inputs,) in loader:
            model(inputs).sum().backward()
            other(inputs).sum().backward()  # reaches nothing of the first one's
            model(inputs).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    backwards = [e for e in noted(observer, Backward) if isinstance(e, Backward)]
    assert [len(e.fed) for e in backwards] == [1, 0, 0] * 2
    assert [e.adds for e in backwards] == [False, False, True] * 2
    drawn = [e for e in noted(observer, Drawn) if isinstance(e, Drawn)]
    assert [e.finite for e in drawn] == [True, False]
    steps = [e for e in noted(observer, Stepped) if isinstance(e, Stepped)]
    norms = [mark.norm for e in steps[2:] for mark in e.gradients if mark is not None]
    assert not any(map(math.isfinite, norms[:1] + norms[2:3]))


@pytest.mark.parametrize("per_batch", [True, False])
def test_a_teacher_that_moves_within_a_step_is_noted(observer: Observer, per_batch: bool) -> None:
    student, teacher = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    with watched(observer):
        for batch in range(4):
            given = torch.ones(1, 1)
            (student(given) - teacher(given)).square().sum().backward()
            if batch % 2:
                optimizer.step()
                optimizer.zero_grad()
            if per_batch or batch % 2:
                teacher.weight.data.add_(0.5)
    moved = noted(observer, Moved)
    assert [e.names for e in moved if isinstance(e, Moved)] == [("weight",)] * (2 * per_batch)


def test_files_of_interest_are_noted_once(
    observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, records = tmp_path / "project", tmp_path / "records"
    records.mkdir()
    (project / "__pycache__").mkdir(parents=True)
    torch.save({}, project / "old.pt")
    torch.save({}, project / "sample.pt")
    monkeypatch.chdir(project)
    observer.trial = replace(observer.trial, records=str(records))
    with watched(observer):
        for name in ("out.txt", "out.txt", "__pycache__/x.pyc", "../elsewhere.txt"):
            Path(name).write_text("")
        Path("out.txt").read_text()
        torch.load("old.pt")
        torch.save({}, "new.pt")
        torch.load("new.pt")
        observer.begin()
        torch.load("sample.pt")
    Path("later.txt").write_text("")
    wrote = [e for e in noted(observer, Wrote) if isinstance(e, Wrote)]
    assert [(e.path, e.before_group) for e in wrote] == [("out.txt", True), ("new.pt", True)]
    read = [e for e in noted(observer, FileRead) if isinstance(e, FileRead)]
    assert [(e.path, code_at(e.at)) for e in read] == [("old.pt", 'torch.load("old.pt")')]


def test_names_that_do_not_match_are_noted(observer: Observer) -> None:
    model = nn.Linear(1, 1)
    with watched(observer):
        model.load_state_dict(model.state_dict(), strict=False)
        model.load_state_dict({"other": torch.ones(1), "bias": torch.ones(1)}, strict=False)
    (loaded,) = (e for e in noted(observer, Loaded) if isinstance(e, Loaded))
    assert (loaded.missing, loaded.unexpected) == (("weight",), ("other",))


def test_a_step_that_a_scaler_skips_is_known(observer: Observer) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(observer):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for given in (1.0, torch.inf):
            scaler.scale(model(torch.full((1, 1), given)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert noted(observer, Scaled) == [Scaled(4.0), Scaled(4.0, skipped=True)]


def test_each_step_that_drops_out_or_draws_has_a_state(observer: Observer) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(observer):
        for (inputs,) in DataLoader(TensorDataset(torch.ones(2, 1))):
            (model(inputs) + torch.randn(1)).sum().backward()
            optimizer.step()
    drew = [e for e in noted(observer, Drew) if isinstance(e, Drew)]
    assert [(e.by, e.step) for e in drew] == [
        ("dropout", 0),
        ("step", 0),
        ("dropout", 1),
        ("step", 1),
    ]
    assert len({e.state for e in drew}) > 2
