"""Rows within an epoch: which steps get one, and what it says, against plain PyTorch."""

import errno
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.data.options import DataOptions
from paceline.data.order import epoch_order
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.errors import InterruptedTraining, SnapshotError
from paceline.metrics.counters import Totals
from paceline.metrics.options import MetricsOptions
from paceline.metrics.tensorboard import TensorBoardLog
from paceline.options.fields import OptionValue
from paceline.results.metrics_table import (
    STEPS,
    StepRow,
    append_rows,
    cells_of,
    read_metrics,
    read_table,
)
from paceline.training.batches.plan import make_plan
from paceline.training.hooks import metrics_logger
from paceline.training.hooks.metrics_logger import TableFile
from paceline.training.hooks.step_rows import StepMark, StepRows, row_between
from paceline.training.options import LoopOptions
from paceline.training.progress import TrainingProgress
from paceline.training.rng import seed_everything
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement, StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import BATCH, SAMPLES, net, pair_of, points, session_on
from tests.support.trainings import RecordingConsole

EPOCHS = 2
LR = 0.1


def agreed(loss: float = 0.0, samples: int = 0) -> Agreement:
    nothing = torch.zeros(1, 4, dtype=torch.float64)
    return Agreement(
        signalled=False,
        bad=None,
        totals=Totals(loss=loss, samples=samples),
        lap_s=0.0,
        data_s=0.0,
        waits_s=(0.0,),
        counted=nothing,
        more=nothing,
    )


def rows_of(
    log_every: int | str, steps_per_epoch: int | None, step_s: float, exchanges: Sequence[int]
) -> list[int]:
    """List the steps that get a row, of a training that exchanges figures after these steps."""
    samples = None if steps_per_epoch is None else 8 * steps_per_epoch
    plan = make_plan(DataOptions(global_batch=8), Division.of(None, 1), samples)
    progress = TrainingProgress(
        loop=LoopOptions(epochs=1),
        snapshot_every_steps=None,
        snapshot_every_s=None,
        plan=plan,
        state=TrainState(),
    )
    rows = StepRows(MetricsOptions(log_every=log_every), progress)
    rows.begin(None)
    found = []
    for step in exchanges:
        state = progress.state
        state.step = state.step_in_epoch = step
        state.train_s = state.epoch_train_s = step * step_s
        progress.has_seen_all = step == steps_per_epoch
        if rows.is_due():
            found.append(rows.take(agreed(), LR, (0.0, 0.0, 0.0)).step)
    return found


def test_auto_gives_about_200_rows_an_epoch_and_one_every_10_s() -> None:
    every = range(1, 2001)
    found = rows_of("auto", 2000, 0.01, every)
    assert found[:4] == [1, 10, 20, 30]
    assert (len(found), found[-1]) == (201, 2000)
    slow = rows_of("auto", 100_000, 1.0, range(1, 101))
    assert slow == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91]
    assert rows_of("auto", 23, 1.0, range(1, 24)) == list(range(1, 24))


def test_the_end_of_an_epoch_has_a_row_whatever_was_asked_for() -> None:
    assert rows_of(10, 23, 0.1, range(1, 24)) == [10, 20, 23]
    assert rows_of("5s", 23, 1.0, range(1, 24)) == [5, 10, 15, 20, 23]
    assert rows_of(1000, 23, 0.1, [7, 23]) == [23]


def test_where_an_epoch_has_no_known_length_rows_come_further_and_further_apart() -> None:
    found = rows_of("auto", None, 1.0, range(1, 4001))
    gaps = [b - a for a, b in pairwise(found)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (1, 10)


def test_a_row_is_what_lies_between_two_marks() -> None:
    before = StepMark(
        2, 20, 3.0, 2.0, 160, Totals(loss=80.0, samples=32, top1=8), LR, (1, 0.2, 0.4)
    )
    after = StepMark(2, 24, 5.0, 3.0, 192, Totals(loss=96.0, samples=64, top1=24), LR, (2, 0.3, 1))
    row = row_between(before, after, accurate=True, sized=True)
    assert (row.epoch, row.step, row.time_s, row.samples) == (2, 24, 5.0, 192)
    assert (row.train_loss, row.train_accuracy, row.images_per_s) == (0.5, 0.5, 32.0)
    assert (row.exposed_comm, row.waiting) == pytest.approx((0.1, 0.5))
    bare = row_between(before, after, accurate=False, sized=False)
    assert (bare.samples, bare.train_accuracy, bare.images_per_s) == (None, None, None)


def test_a_mark_survives_a_snapshot() -> None:
    mark = StepMark(2, 20, 3.0, 2.0, 160, Totals(loss=0.1 + 0.2, samples=32, top1=8), LR)
    found = StepMark.from_json(mark.to_json())
    assert (found.step, found.train_s, found.totals) == (20, 2.0, mark.totals)
    with pytest.raises(SnapshotError, match="an object is missing"):
        StepMark.from_json(None)
    with pytest.raises(SnapshotError, match="step_mark has no loss"):
        StepMark.from_json({**mark.to_json(), "loss": None})


def test_on_a_full_disk_rows_wait_and_it_is_said_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = RecordingConsole()
    table = TableFile(tmp_path / "steps.csv", STEPS, console)
    table.start(0)

    def full(*given: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics_logger, "append_rows", full)
    rows = [cells_of(StepRow(epoch=1, step=step, time_s=1.0)) for step in range(1, 8)]
    for row in rows[:-1]:
        table.append(row)
    assert console.lines == [
        f"{count} rows of steps.csv could not be written: No space left on device; training goes on"
        for count in (1, 2, 4)
    ]
    monkeypatch.setattr(metrics_logger, "append_rows", append_rows)
    table.append(rows[-1])
    assert read_table(tmp_path / "steps.csv", STEPS) == rows


def plain_losses() -> list[tuple[float, int]]:
    """What one process without Paceline finds: the mean loss and the samples of each step."""
    seed_everything(0)
    model, (inputs, targets) = net(), points()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    found = []
    for epoch in range(EPOCHS):
        for picked in torch.from_numpy(epoch_order(SAMPLES, 0, epoch)).split(BATCH):
            loss = F.cross_entropy(model(inputs[picked]), targets[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
            found.append((loss.item(), len(picked)))
    return found


def train(
    group: Group, directory: Path, log_every: OptionValue, stop: int | None, **more: OptionValue
) -> None:
    flag = StopFlag(under_launcher=True)
    settings = {"log_every": log_every, **more}
    with suppress(InterruptedTraining), session_on(group, directory, settings, flag) as s:
        model = s.model(net())
        optimizer = s.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
        batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
        for _ in s.epochs(EPOCHS):
            for batch in batches:
                inputs, targets = pair_of(batch)
                outputs: Tensor = model(inputs)
                s.step(F.cross_entropy(outputs, targets), outputs=outputs, targets=targets)
                optimizer.param_groups[0]["lr"] *= 0.9
                if s.engine.context.progress.state.step == stop:
                    flag.name = "SIGTERM"
    s.engine.snapshots.flush()


def check_rows(path: Path, steps: Sequence[int]) -> None:
    """Compare a table's rows with plain PyTorch's losses over the samples between them."""
    rows, plain = read_metrics(path, [], STEPS), plain_losses()
    assert list(rows.column("step")) == list(steps)
    before = 0
    for place, step in enumerate(steps):
        between = plain[before:step]
        size = sum(samples for _, samples in between)
        expected = {
            "epoch": 1 if step <= 7 else 2,
            "samples": sum(samples for _, samples in plain[:step]),
            "train_loss": sum(loss * samples for loss, samples in between) / size,
            "lr": LR * 0.9**step,  # as the script has left it
        }
        found = {name: rows.column(name)[place] for name in expected}
        assert found == pytest.approx(expected, rel=1e-5)
        before = step
    assert all(0 <= share <= 1 for share in rows.column("train_accuracy"))
    times = rows.column("time_s")
    assert list(times) == sorted(times)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rows_loss_is_the_mean_since_the_row_before(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, train, tmp_path, 3, None)
    check_rows(tmp_path / "steps.csv", [3, 6, 7, 9, 12, 14])


@pytest.mark.ranks
def test_events_that_cant_be_written_end_neither_rows_nor_the_training(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        def full(log: TensorBoardLog, row: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        TensorBoardLog.add = full  # type: ignore[assignment,method-assign]  # in a fork
        train(group, tmp_path, 3, None, tensorboard=True)

    run_ranks(1, body)
    check_rows(tmp_path / "steps.csv", [3, 6, 7, 9, 12, 14])
    assert len(read_table(tmp_path / "metrics.csv")) == EPOCHS


@pytest.mark.ranks
def test_after_a_stop_the_rows_go_on_where_the_snapshot_stands(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, 3, 4)
    table = tmp_path / "steps.csv"
    # The step of the signal is finished, and has a row: what was trained until then can be seen.
    check_rows(table, [3, 5])
    with table.open("a") as file:  # as if the training had gone on, and was killed within a row
        file.write(f"1,6,{9.9},48,9.9,0.5,0.1,1.0,,\n1,7,9")
    run_ranks(1, train, tmp_path, 3, None)
    check_rows(table, [3, 5, 6, 7, 9, 12, 14])
    assert not math.isnan(read_metrics(table, [], STEPS).column("images_per_s")[-1])
    assert len(read_table(tmp_path / "metrics.csv")) == EPOCHS
