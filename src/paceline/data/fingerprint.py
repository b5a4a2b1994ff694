"""Fingerprints of data sets: compared between workers, so that all train on the same data.

Also of a data set's attributes: compared between epochs, so that no loader process reads with
outdated ones.
"""

import gc
import hashlib
import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import islice
from logging import Handler, Logger, Manager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from paceline.data.memory import TensorData

_SAMPLED = 64
"""Samples whose content is hashed: a few spread over the data set tell two of them apart."""
_SHOWN = 12
_MAX_ITEMS = 1000
"""Of a list or dictionary that is looked at whole."""
_COLLECTIONS = (dict, list, tuple, set, frozenset, deque)
_KNOWN_BY_PLACE = type | FunctionType | ModuleType | random.Random | Logger | Handler | Manager
"""What isn't looked into: much more hangs on it than a data set's own."""
_MAX_LOOKS = 20_000
"""Values that are looked at: some milliseconds."""


def data_fingerprint(data: object) -> str:
    """Describe a data set by type, size and, where it is cheap and certain, by its content.

    Tensors of whole numbers are looked at in a few places. Floats aren't: two hosts may round what
    a script has computed differently. Of other data sets nothing is read: items may be random, or
    slow.
    """
    size = f" of {len(data):,} samples" if isinstance(data, Sized) else ""
    name = type(data).__name__
    if isinstance(data, TensorData):
        digest = _of_tensors(data.labels, data.images[_places(len(data.labels))])
        return f"{name} {data.name} of {data.num_samples:,} samples, {digest}"
    if isinstance(data, TensorDataset):
        return f"{name}{size}, {_of_tensors(*(t[_places(len(t))] for t in data.tensors))}"
    return f"{name}{size}"


def picked_samples(data: object) -> str:
    """Describe which samples torch's `Subset`s pick, `data` itself or those that it is made of.

    Data sets in a data set's attributes are looked at as well, as where one wraps a subset for its
    transforms. No sample is read.

    Returns:
        Such as `200 samples, 1f4b7a90`; empty where there is no subset.
    """
    waiting, seen, layers = deque([data]), set[int](), list[str]()
    while waiting and len(seen) < _MAX_ITEMS:
        value = waiting.popleft()
        if id(value) in seen or not isinstance(value, Dataset):
            continue
        seen.add(id(value))
        if isinstance(value, Subset):
            layers.append(_of_indices(value.indices))
        if isinstance(value, ConcatDataset):
            waiting += value.datasets
        waiting += getattr(value, "__dict__", {}).values()
    return " of ".join(layers)


def _of_indices(indices: Sequence[int]) -> str:
    numbers = np.asarray(indices)
    if numbers.dtype.kind not in "iu":  # of a data set with keys, say
        content = repr(list(indices)).encode()
    else:
        content = numbers.astype(np.int64).tobytes()
    return f"{len(indices):,} samples, {hashlib.sha256(content).hexdigest()[:_SHOWN]}"


def _places(samples: int) -> Tensor:
    """Choose samples evenly, the first and the last among them: (K,)."""
    if samples <= _SAMPLED:
        return torch.arange(samples)
    return torch.arange(_SAMPLED) * (samples - 1) // (_SAMPLED - 1)


def _of_tensors(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            content = tensor.cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().tobytes())
    return digest.hexdigest()[:_SHOWN]


def describe_state(data: object) -> tuple[object, ...]:
    """List what a data set's attributes hold, so that two lists differ where it has changed.

    Attributes of what it holds (a wrapped data set, a transform) are listed as well. Plain values
    count by what they are, tensors and arrays by where they lie, by a few elements and by the
    changes that torch counts, functions by which they are, long lists by their length and some
    items. Nothing is read by item.
    """
    return tuple(islice(_looks(data), _MAX_LOOKS))


def find_held(holders: Iterable[object], kinds: type | tuple[type, ...]) -> list[Any]:
    """Find objects among others, and in what their attributes hold. Nearest first.

    Long lists aren't looked through, nor are classes, modules, functions and the like.
    """
    found, waiting, seen = list[Any](), deque(holders), set[int]()
    while waiting and len(seen) < _MAX_LOOKS:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kinds):
            found.append(value)
        is_long = isinstance(value, _COLLECTIONS) and len(value) > _MAX_ITEMS
        if not (is_long or isinstance(value, _KNOWN_BY_PLACE)):
            waiting += gc.get_referents(value)
    return found


def _looks(data: object) -> Iterator[object]:
    waiting, later, seen = deque([data]), deque[object](), set[int]()
    while waiting or later:  # what is nearest first, and many values after single ones
        value = (waiting or later).popleft()
        if value is None or isinstance(value, str | bytes | int | float | complex):
            yield value
            continue
        yield type(value).__name__
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value.data_ptr() if value.layout == torch.strided else id(value)
            yield 0 if value.is_inference() else value._version
        elif isinstance(value, np.ndarray):
            some = value.flat[:: max(1, value.size // _SAMPLED)] if value.dtype != object else None
            yield id(value)
            yield 0 if some is None else zlib.crc32(some.tobytes())
        elif isinstance(value, _COLLECTIONS):
            yield len(value)
            parts = _flat(value) if isinstance(value, dict) else list(value)
            step = 1 if len(parts) <= _MAX_ITEMS else len(parts) // _SAMPLED
            (waiting if len(parts) <= _SAMPLED else later).extend(parts[::step])
        elif type(value).__module__.startswith(("multiprocessing", "ctypes")):
            yield getattr(value, "value", None)  # multiprocessing.Value: shared, and set anew
        elif isinstance(value, partial | MethodType):
            waiting += _of_callable(value)
        elif isinstance(value, _KNOWN_BY_PLACE | Mapping) or not hasattr(value, "__dict__"):
            yield id(value)
        else:
            waiting += _flat(vars(value))


def _of_callable(value: "partial[Any] | MethodType") -> list[object]:
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    return [value.func, value.args, value.keywords]


def _flat(named: Mapping[Any, object]) -> list[object]:
    return [*named.keys(), *named.values()]  # no pairs: an object made here has no identity to keep
