from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from paceline.errors import UsageError
from paceline.metrics import tensorboard
from paceline.metrics.tensorboard import TensorBoardLog, require_tensorboard
from paceline.results.metrics_table import EpochRow, StepRow


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(directory))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def write(directory: Path, first_step: int, steps: list[int], loss: float) -> None:
    log = TensorBoardLog(directory, first_step)
    for step in steps:
        log.add(StepRow(epoch=1, step=step - 5, time_s=0.5, train_loss=loss, train_accuracy=0.25))
        log.add(StepRow(epoch=1, step=step, time_s=1.0, train_loss=loss))
        log.add(
            EpochRow(
                epoch=1,
                step=step,
                time_s=1.0,
                train_loss=9.0,
                val_loss=0.75,
                val_accuracy=0.5,
                extra={"val_f1": 0.125, "words": 3.0},
            )
        )
    log.close()


def test_figures_at_their_steps_also_after_a_resume(tmp_path: Path) -> None:
    write(tmp_path, 0, [10, 20, 30], loss=1.0)
    write(tmp_path, 20, [30, 40], loss=0.5)  # from the snapshot of step 20
    losses = [(step, 1.0 if step <= 20 else 0.5) for step in range(5, 45, 5)]
    assert points(tmp_path, "train/loss") == losses
    assert points(tmp_path, "train/accuracy") == [(5, 0.25), (15, 0.25), (25, 0.25), (35, 0.25)]
    # Charts of one name for training and validation; an epoch's mean is in none of them.
    for tag, value in {"val/loss": 0.75, "val/accuracy": 0.5, "epoch/train_loss": 9.0}.items():
        assert points(tmp_path, tag) == [(step, value) for step in (10, 20, 30, 40)]
    assert points(tmp_path, "val/f1")[0] == (10, 0.125)
    assert points(tmp_path, "words")[-1] == (40, 3.0)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    require_tensorboard()
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[tensorboard\]'"):
        require_tensorboard()
