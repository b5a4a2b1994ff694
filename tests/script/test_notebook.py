"""`notebook_launcher` from a notebook's cell: functions defined right there, on several workers."""

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import InterruptedTraining, JobError, UsageError
from paceline.script.notebook import _signals_held, notebook_launcher
from tests.launch.waiting import patient
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
    found = notebook_launcher(train, workers=workers, run_dir=str(tmp_path / "r"))
    assert found == [{"rank": r, "of": workers, "steps": 3} for r in range(workers)]
    assert (tmp_path / "r" / "summary.json").exists()


def test_a_workers_traceback_reaches_the_cell() -> None:
    def cell() -> None:
        if os.environ["RANK"] == "1":
            raise KeyError("mine")
        signal.pause()  # the other is ended

    with pytest.raises(JobError, match="worker 1 failed") as caught:
        notebook_launcher(cell, workers=2)
    assert "KeyError: 'mine'" in str(caught.value)
    assert "in cell" in str(caught.value)


def test_a_worker_that_dies_is_named() -> None:
    def cell() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(JobError, match="worker 0 ended without a word"):
        notebook_launcher(cell, workers=1)


def trains_on(run_dir: str, number: int) -> None:
    """Train without an end; the notebook gets a signal after the second epoch."""
    with paceline.session(run_dir=run_dir, device="cpu", progress="off") as s:
        model = s.model(nn.Linear(1, 1))
        s.optimizer(torch.optim.SGD(model.parameters(), 1e-9))
        batches = s.loader(TensorDataset(torch.ones(4, 1)), global_batch=4)
        for epoch in s.epochs(10**6):
            for batch in batches:
                s.step(model(first_of(batch)).mean())
            if epoch == 1 and s.is_main:
                os.kill(os.getppid(), number)


@pytest.mark.slow
def test_interrupting_the_cell_saves_and_ends_the_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(trains_on, workers=2, run_dir=str(tmp_path / "r"), number=signal.SIGINT)
    assert any((tmp_path / "r" / "snapshots").glob("step-*"))
    assert '"signal"' in (tmp_path / "r" / "summary.json").read_text()
    # No command can start a notebook's function: the function's own session resumes.
    way = f"paceline.session(run_dir='{tmp_path / 'r'}', resume=True)"
    line = next(x for x in capfd.readouterr().out.splitlines() if x.startswith("Stopped"))
    assert line.startswith("Stopped. Resume from step ")
    assert line.endswith(f": {way}")


@pytest.mark.slow
def test_what_a_launch_refuses_names_no_command(tmp_path: Path) -> None:
    def more(resume: bool, seed: int = 0) -> None:
        run_dir, clip = tmp_path / "r", None if seed else 1.0
        with paceline.session(
            run_dir=run_dir, resume=resume, device="cpu", progress="off", seed=seed, clip_norm=clip
        ) as s:
            model = s.model(nn.Linear(1, 1))
            s.optimizer(torch.optim.SGD(model.parameters(), 0.1))
            s.loader(TensorDataset(torch.ones(12, 1)), global_batch=4)
            s.epochs(1)

    notebook_launcher(train, workers=1, run_dir=str(tmp_path / "r"))
    with pytest.raises(JobError, match=r"start a new one\s*$"):
        notebook_launcher(more, workers=1, resume=True, seed=5)
    for resume, way in ((False, r"Resume it: paceline\.session"), (True, "give those of the run")):
        with pytest.raises(JobError, match=way) as caught:
            notebook_launcher(more, workers=1, resume=resume)
        assert "paceline resume" not in str(caught.value)
        assert "--allow-change" not in str(caught.value)


def test_usage() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        notebook_launcher(print, workers=0)


def test_a_worker_of_paceline_run_launches_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_REQUEST", "{}")
    with pytest.raises(UsageError, match=r"start the script by `python`, or call the function"):
        notebook_launcher(print)


@dataclass(frozen=True)
class Key:
    pass


@dataclass
class Result:
    accuracy: object
    by_epoch: dict[int, float]


def test_values_come_as_plain_ones_with_their_keys() -> None:
    def cell() -> object:
        return {
            "arrays": [np.arange(2), np.float32(0.5), np.int64(3)],
            "result": Result(torch.tensor(0.5, requires_grad=True) * 1, {0: 1.0}),
            ((1, 2), "a"): None,
        }

    expected: dict[object, object] = {
        "arrays": [[0, 1], 0.5, 3],
        "result": {"accuracy": 0.5, "by_epoch": {0: 1.0}},
        ((1, 2), "a"): None,
    }
    assert notebook_launcher(cell, workers=1) == [expected]
    with pytest.raises(JobError, match="gave a Linear back"):
        notebook_launcher(lambda: nn.Linear(1, 1), workers=1)
    with pytest.raises(JobError, match="has a Key as a key"):
        notebook_launcher(lambda: {Key(): 1}, workers=1)


def test_all_workers_draw_as_the_notebook_would() -> None:
    before = random.getstate()
    first, second = notebook_launcher(lambda: [random.random() for _ in range(2)], workers=2)
    assert first == second == [random.random() for _ in range(2)]
    random.setstate(before)


def test_sigterm_saves_and_ends_the_workers(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(InterruptedTraining):
        notebook_launcher(trains_on, workers=2, run_dir=str(tmp_path / "r"), number=signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert any((tmp_path / "r" / "snapshots").glob("step-*"))


def test_an_interrupted_step_may_take_its_time_and_a_second_signal_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.script.notebook._FAILED_END_S", 0.01)

    def cell(path: str) -> None:
        def save(*_: object) -> None:
            time.sleep(0.5)
            Path(path).touch()
            os._exit(0)

        signal.signal(signal.SIGTERM, save)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    def stubborn() -> None:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
        os.kill(os.getppid(), signal.SIGINT)
        while True:
            time.sleep(60)

    with TemporaryDirectory() as place:
        with pytest.raises(KeyboardInterrupt):
            notebook_launcher(cell, workers=1, path=f"{place}/saved")
        assert Path(place, "saved").exists()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(stubborn, workers=1)
    assert time.monotonic() - began < patient(60.0)  # not the two minutes of a first signal


def test_what_fails_as_workers_end_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    def cell() -> None:
        def fail(*_: object) -> None:
            raise OSError("the disk is full")

        signal.signal(signal.SIGTERM, fail)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(cell, workers=1)
    said = capfd.readouterr().err
    assert "worker 0 failed:" in said
    assert "OSError: the disk is full" in said


def test_a_signal_that_another_thread_takes_waits_for_the_fork() -> None:
    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # within the block it must not come
        with _signals_held():
            os.kill(os.getpid(), signal.SIGINT)
            other = threading.Thread(target=time.sleep, args=(0.1,))
            other.start()
            other.join()
            seen.append(1)
        seen.append(2)
    assert seen == [1]


def test_a_worker_launches_no_others() -> None:
    with pytest.raises(JobError, match="was started as a worker"):
        notebook_launcher(lambda: notebook_launcher(print), workers=2)
