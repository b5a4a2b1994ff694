"""Weights in one file for other programs: safetensors, or a plain PyTorch state dict."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from paceline.checkpoint.host_tensors import on_host
from paceline.errors import UsageError
from paceline.files import replacing, writing


def export_weights(tensors: Mapping[str, Tensor], file: Path, *, overwrite: bool = False) -> None:
    """Write weights so that a reader sees the whole file or none.

    Args:
        tensors: The unwrapped model's `state_dict()`, on any device; names are written as they are.
        file: `.safetensors`, or `.pt` or `.pth` (then `torch.load(file, weights_only=True)` reads
            it).
        overwrite: Replace a file that exists.

    Raises:
        UsageError: The suffix is unknown, the file exists, its directory doesn't or can't be
            written.
        StorageError: The disk is full; nothing is left behind.
        TypeError: A tensor is of a type that safetensors can't hold.
    """
    write = _FORMATS.get(file.suffix)
    if write is None:
        known = ", ".join(_FORMATS)
        raise UsageError(
            f"weights can't be written as {file.suffix or file.name!r}. Known: {known}"
        )
    with writing(file):
        if file.exists() and not overwrite:
            raise UsageError(f"{file} exists; name another file, or replace it with --overwrite")
        if not file.parent.is_dir():
            raise UsageError(f"{file} can't be written: there is no directory {file.parent}")
        # Unlike a snapshot, the file is meant for others: its mode is the user's usual one.
        try:
            with replacing(file) as opened:
                write(tensors, opened)
        except RuntimeError as error:
            failed = _of_storage(error)
            if failed is None:
                raise
            raise failed from error


def _of_storage(error: BaseException | None) -> OSError | None:
    """Find the storage's own error: `torch.save` ends with one about its archive instead."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _write_safetensors(tensors: Mapping[str, Tensor], opened: BinaryIO) -> None:
    for chunk in on_host(tensors).chunks():
        opened.write(chunk)


def _write_state_dict(tensors: Mapping[str, Tensor], opened: BinaryIO) -> None:
    # Clones: a view would drag the whole memory it is a part of into the file.
    plain = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    torch.save(plain, opened)


_FORMATS: Mapping[str, Callable[[Mapping[str, Tensor], BinaryIO], None]] = {
    ".safetensors": _write_safetensors,
    ".pt": _write_state_dict,
    ".pth": _write_state_dict,
}
