import json

import pytest

from paceline.errors import SnapshotError
from paceline.training.snapshots.train_state import TrainState


def test_json_and_back() -> None:
    state = TrainState(epoch=2, step=17, val_loss=0.1 + 0.2, best_epoch=1, ended="patience")
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize("content", [None, [], {}, {"step": 1}])
def test_without_a_position_nothing_can_go_on(content: object) -> None:
    with pytest.raises(SnapshotError, match="doesn't say where the training stands"):
        TrainState.from_json(content)


def test_what_a_later_version_has_added_is_named() -> None:
    with pytest.raises(SnapshotError, match="has more, which this version"):
        TrainState.from_json({**TrainState().to_json(), "more": 1})


def test_a_field_that_is_missing_is_named() -> None:
    content = TrainState(step=3, epochs_without_gain=2).to_json()
    del content["epochs_without_gain"]
    with pytest.raises(SnapshotError, match="it has no epochs_without_gain"):
        TrainState.from_json(content)
