import json
import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.state_encoding import decode, encode
from paceline.errors import SnapshotError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def through_json(value: object) -> object:
    tensors: dict[str, Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, "state", tensors))), tensors)


@given(VALUES)
def test_every_value_comes_back(value: object) -> None:
    found = through_json(value)
    assert found == value
    assert type(found) is type(value)


def test_what_is_not_a_number_comes_back() -> None:
    found = through_json([math.inf, -math.inf, math.nan])
    assert isinstance(found, list)
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


def test_tensors_come_back_by_name_and_are_copies() -> None:
    own = torch.arange(3)
    state = OrderedDict(a=[own, (torch.tensor(1.5), {"a": own + 1})], b={"a/0": own + 2})
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(state, "state", tensors))
    found = decode(json.loads(text), tensors)
    assert isinstance(found, dict)
    assert torch.equal(found["a"][0], own)
    assert torch.equal(found["a"][1][0], torch.tensor(1.5))
    assert torch.equal(found["a"][1][1]["a"], own + 1)
    assert torch.equal(found["b"]["a/0"], own + 2)
    found["a"][0][0] = 9
    assert own[0] == 0


def test_names_that_look_alike_stay_apart() -> None:
    """`a/b` in one dictionary, and `b` in the dictionary `a`."""
    found = through_json({"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}})
    assert isinstance(found, dict)
    assert (int(found["a/b"]), int(found["a"]["b"])) == (1, 2)


def test_keys_of_different_types_stay_apart() -> None:
    found = through_json({1: torch.tensor(1), "1": torch.tensor(2)})
    assert isinstance(found, dict)
    assert (int(found[1]), int(found["1"])) == (1, 2)


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(TypeError, match="state/best/1 is a object"):
        encode({"best": [1, object()]}, "state", {})


@pytest.mark.parametrize("damaged", [{"tensor": "/gone"}, {"what": 1}])
def test_damage_is_found(damaged: object) -> None:
    with pytest.raises(SnapshotError):
        decode([damaged], {})
