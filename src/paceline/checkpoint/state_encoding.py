"""State of any kind as JSON and named tensors, and back, bit for bit."""

import math
from collections.abc import Mapping

from torch import Tensor

from paceline.errors import SnapshotError


def encode(value: object, path: str, tensors: dict[str, Tensor]) -> object:
    """Turn a value into JSON; the tensors in it go into a dictionary of their own.

    Args:
        value: None, bool, int, float, str, tensors, and lists, tuples and dictionaries of these.
        path: Where it stands, for the tensors' names and for error messages.
        tensors: Gets the tensors, not copied.

    Raises:
        TypeError: It holds something else.
    """
    match value:
        case None | bool() | int() | str():
            return value
        # JSON has no infinities and no NaN.
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case list():
            return [encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        # What JSON would change comes back through an object with one key.
        case tuple():
            return {"tuple": [encode(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
        case Tensor():
            key = path if path.startswith("/") else f"/{path}"
            while key in tensors:  # the keys 1 and "1" of a dictionary, say
                key += "+"
            tensors[key] = value
            return {"tensor": key}
        case Mapping():
            items = value.items()
            return {
                "items": [
                    [encode(k, path, {}), encode(v, f"{path}/{k}", tensors)] for k, v in items
                ]
            }
    raise TypeError(f"the state {path} is a {type(value).__name__}, which can't be saved")


def decode(value: object, tensors: Mapping[str, Tensor]) -> object:
    """Read what `encode` made; tensors are copies.

    Raises:
        SnapshotError: A tensor is missing, or the JSON isn't what `encode` writes.
    """
    match value:
        case {"float": str(text)}:
            return float(text)
        case {"tuple": list(items)}:
            return tuple(decode(item, tensors) for item in items)
        case {"tensor": str(key)}:
            if key not in tensors:
                raise SnapshotError(f"the snapshot's state lacks the tensor {key}")
            return tensors[key].detach().clone()
        case {"items": list(pairs)}:
            return {decode(k, tensors): decode(v, tensors) for k, v in pairs}
        case list():
            return [decode(item, tensors) for item in value]
        case dict():
            raise SnapshotError(f"the snapshot's state holds an unknown entry: {value}")
    return value


def require_entry(state: Mapping[str, object], name: str) -> object:
    """Give an entry of a snapshot's `state.json`, which every snapshot has.

    Raises:
        SnapshotError: There is none.
    """
    if name not in state:
        raise SnapshotError(f"the snapshot's state.json isn't complete: it has no {name}")
    return state[name]


def require_mapping(value: object) -> Mapping[str, object]:
    """Give an object of a snapshot's state.

    Raises:
        SnapshotError: It is something else.
    """
    if not isinstance(value, Mapping):
        raise SnapshotError("the snapshot's state isn't complete: an object is missing")
    return value


def require_list(value: object) -> list[object]:
    """Give a list of a snapshot's state.

    Raises:
        SnapshotError: It is something else.
    """
    if not isinstance(value, list):
        raise SnapshotError("the snapshot's state isn't complete: a list is missing")
    return value
