"""`launch` from a notebook's cell: functions defined right there, on several workers."""

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import JobError, UsageError
from paceline.script.notebook import launch
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def one_thread_and_no_process_left() -> Iterator[None]:
    torch.set_num_threads(1)
    before = set(psutil.Process().children())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads of pytest
        yield
    assert set(psutil.Process().children()) <= before


def first_of(batch: object) -> Tensor:
    assert isinstance(batch, list)
    found: Tensor = batch[0]
    return found


def train(run_dir: str, steps: int = 3) -> dict[str, object]:
    with paceline.session(run_dir=run_dir, device="cpu", progress="off") as s:
        model = s.model(nn.Linear(1, 1))
        s.optimizer(torch.optim.SGD(model.parameters(), 0.1))
        batches = s.loader(TensorDataset(torch.ones(4 * steps, 1)), global_batch=4)
        for _ in s.epochs(1):
            for batch in batches:
                s.step(model(first_of(batch)).mean())
        return {"rank": s.rank, "of": s.world_size, "steps": s.engine.context.progress.state.step}


@pytest.mark.parametrize("workers", [1, 2, slow(3)])
@pytest.mark.slow
def test_a_function_gives_its_values_in_rank_order(workers: int, tmp_path: Path) -> None:
    found = launch(train, workers=workers, run_dir=str(tmp_path / "r"))
    assert found == [{"rank": r, "of": workers, "steps": 3} for r in range(workers)]
    assert (tmp_path / "r" / "summary.json").exists()


def test_a_workers_traceback_reaches_the_cell() -> None:
    def cell() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("mine")
        signal.pause()  # the other is ended

    with pytest.raises(JobError, match="worker 1 failed") as caught:
        launch(cell, workers=2)
    assert "KeyError: 'mine'" in str(caught.value)
    assert "in cell" in str(caught.value)


def test_a_worker_that_dies_is_named() -> None:
    def cell() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(JobError, match="worker 0 ended without a word"):
        launch(cell, workers=1)


@pytest.mark.slow
def test_interrupting_the_cell_saves_and_ends_the_workers(tmp_path: Path) -> None:
    def cell() -> None:
        with paceline.session(run_dir=tmp_path / "r", device="cpu", progress="off") as s:
            model = s.model(nn.Linear(1, 1))
            s.optimizer(torch.optim.SGD(model.parameters(), 1e-9))
            batches = s.loader(TensorDataset(torch.ones(4, 1)), global_batch=4)
            for epoch in s.epochs(10**6):
                for batch in batches:
                    s.step(model(first_of(batch)).mean())
                if epoch == 1 and s.is_main:
                    os.kill(os.getppid(), signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        launch(cell, workers=2)
    assert any((tmp_path / "r" / "snapshots").glob("step-*"))
    assert '"signal"' in (tmp_path / "r" / "summary.json").read_text()


def test_usage() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        launch(print, workers=0)


def test_a_worker_of_paceline_run_launches_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_REQUEST", "{}")
    with pytest.raises(UsageError, match=r"start the script by `python`, or call the function"):
        launch(print)
