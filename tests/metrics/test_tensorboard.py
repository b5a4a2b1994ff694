from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from paceline.errors import UsageError
from paceline.metrics import tensorboard
from paceline.metrics.tensorboard import TensorBoardLog, require_tensorboard
from paceline.results.metrics_table import EpochRow


def points(directory: Path, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(directory))
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def write(directory: Path, first_step: int, steps: list[int], loss: float) -> None:
    log = TensorBoardLog(directory, first_step)
    for step in steps:
        log.add(EpochRow(epoch=1, step=step, time_s=1.0, train_loss=loss, val_accuracy=0.5))
    log.close()


def test_figures_at_their_steps_also_after_a_resume(tmp_path: Path) -> None:
    write(tmp_path, 0, [10, 20, 30], loss=1.0)
    write(tmp_path, 20, [30, 40], loss=0.5)  # from the snapshot of step 20
    assert points(tmp_path, "train/train_loss") == [(10, 1.0), (20, 1.0), (30, 0.5), (40, 0.5)]
    assert points(tmp_path, "val/accuracy")[0] == (10, 0.5)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    require_tensorboard()
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[tensorboard\]'"):
        require_tensorboard()
