import json

import pytest

from paceline.errors import SnapshotError
from paceline.training.snapshots.train_state import TrainState


def test_json_and_back() -> None:
    state = TrainState(epoch=2, step=17, val_loss=0.1 + 0.2, best_epoch=1, ended="patience")
    assert TrainState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize("content", [None, [], {}, {**TrainState().to_json(), "more": 1}])
def test_what_another_version_wrote(content: object) -> None:
    with pytest.raises(SnapshotError, match="another Paceline version"):
        TrainState.from_json(content)
