"""What a data set is, in one line: compared between workers, so that all train on the same."""

import hashlib
from collections.abc import Sized

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.data.memory import TensorData
from paceline.data.protocols import Fingerprinted

_SAMPLED = 64
"""Samples whose content is hashed: a few spread over the data set tell two of them apart."""
_SHOWN = 12


def data_fingerprint(data: object) -> str:
    """Describe a data set by type, size and, where it is cheap and certain, by its content.

    Tensors of whole numbers are looked at in a few places. Floats aren't: two hosts may round what
    a script has computed differently. Of other data sets nothing is read: items may be random, or
    slow.

    Args:
        data: Any data set.
    """
    size = f" of {len(data):,} samples" if isinstance(data, Sized) else ""
    name = type(data).__name__
    if isinstance(data, TensorData):
        digest = _of_tensors(data.labels, data.images[_places(len(data.labels))])
        return f"{name} {data.name} of {data.num_samples:,} samples, {digest}"
    if isinstance(data, TensorDataset):
        return f"{name}{size}, {_of_tensors(*(t[_places(len(t))] for t in data.tensors))}"
    if isinstance(data, Fingerprinted):
        return f"{name}{size}, {data.fingerprint()[:_SHOWN]}"
    return f"{name}{size}"


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
