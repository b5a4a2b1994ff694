"""What a worker's witness writes down, of Paceline's session and of a plain script."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it: once here rather than in a test
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.data.batch import Batch
from paceline.training.components import Components
from paceline.training.snapshots.train_state import TrainState
from paceline.verify.events import (
    Backward,
    Began,
    Drawn,
    Drew,
    Evaluated,
    EventWriter,
    ModelBuilt,
    Monitored,
    Normalised,
    PassBegun,
    PassEnded,
    Printed,
    Stepped,
    read_events,
)
from paceline.verify.observing.observer import Observer, SessionHook
from paceline.verify.observing.script_hooks import watched
from paceline.verify.source_lines import code_at
from paceline.verify.trial import EnoughSeenError, Trial


@pytest.fixture
def observer(tmp_path: Path) -> Observer:
    trial = Trial(request="", records=str(tmp_path), steps=2)
    return Observer(trial, 0, EventWriter(tmp_path / "rank-0.jsonl"))


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
    watcher = SessionHook(observer)
    model = nn.Linear(2, 1)
    components, position = Components(), TrainState()
    components.models["model"] = model
    components.optimizers.append(torch.optim.SGD(model.parameters()))
    watcher.setup(components, position, {})
    watcher.begin_step(0, Batch(torch.ones(2, 2), 2, 4, np.array([3, 5])))
    watcher.before_backward(torch.tensor(0.5), 0.25)
    handed, drawn, began, backward = read_events(observer.writer.path)
    assert isinstance(began, Began)
    assert isinstance(handed, ModelBuilt)
    assert set(handed.tensors) == {"weight", "bias"}
    assert isinstance(drawn, Drawn)
    assert (drawn.samples, drawn.total, drawn.trains) == (("3", "5"), 4, True)
    assert backward == Backward(0.5, 0.25)
    position.epoch = 2
    with pytest.raises(EnoughSeenError):
        watcher.begin_step(9, Batch(torch.ones(2, 2), 2, 4, np.array([3, 5])))


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
