"""One number for all weights of a model: equal if and only if every bit is."""

import hashlib
from collections.abc import Mapping

from torch import Tensor

from paceline.checkpoint.host_tensors import raw_bytes


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash a model's tensors: names, types, shapes and values.

    In sorted name order, each as name (UTF-8), NUL, type like `float32`, NUL, shape like `(10,
    128)`, NUL, raw little-endian bytes in row-major order. Memory format and device don't count.

    Args:
        tensors: The unwrapped model's `state_dict()`; nothing is stripped from the names.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name}\0{dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()
