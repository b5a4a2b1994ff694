"""A tensor in a few numbers: its hash, its norm, and a sketch that gives distances.

The sketch adds a tensor's elements with pseudo-random signs into buckets (Charikar, Chen and
Farach-Colton 2002): it is linear, and the squared norm of a sketch is on average that of its
tensor. So the difference of two sketches tells how far two tensors are apart that were never in
one process, to about 18% with 64 buckets.
"""

import base64
import hashlib
import math
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing import TypeGuard

    from torch.distributed.tensor import DTensor

BUCKETS = 64
_BLOCK = 1 << 16
"""Elements that share one row of signs; a sign of their own makes blocks independent."""
_SEED = 20_240_817
_PACKING = struct.Struct(f"<{BUCKETS}d")


@dataclass(frozen=True, slots=True)
class TensorSketch:
    """What is kept of one tensor."""

    sha256: str
    """Of dtype, shape and bytes; the first 16 digits."""
    norm: float = math.nan
    """L2; NaN where only the hash was wanted."""
    sketch: str = ""
    """(BUCKETS,) float64 in base64."""


def mark(tensor: Tensor, *, whole: bool) -> TensorSketch:
    """Return a tensor's sketch. Blocks for its copy to the CPU.

    A DTensor is gathered, as fully_shard's parameters and gradients are: called by every rank.

    Args:
        tensor: Any shape, dtype, layout and device; not changed.
        whole: Also norm and sketch.
    """
    dense = _gathered(tensor.detach())
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    flat = dense.to("cpu").contiguous().reshape(-1)
    sha256 = _hash_bytes(flat, f"{tensor.dtype} {tuple(tensor.shape)}")
    if not whole:
        return TensorSketch(sha256)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    buckets, squares = torch.zeros(BUCKETS, dtype=torch.float64), 0.0
    for number, start in enumerate(range(0, flat.numel(), _BLOCK)):
        block = flat[start : start + _BLOCK].to(torch.float64)  # (up to _BLOCK,)
        squares += float(block.square().sum())
        padded = torch.zeros(-(-block.numel() // BUCKETS) * BUCKETS, dtype=torch.float64)
        padded[: block.numel()] = block * sign_block()[: block.numel()]
        own_sign = float(sign_block()[(number * 40_503 + 7) % _BLOCK])
        buckets += padded.view(-1, BUCKETS).sum(0) * own_sign
    packed = base64.b64encode(_PACKING.pack(*buckets.tolist())).decode()
    return TensorSketch(sha256, math.sqrt(squares), packed)


def hash_tensor(tensor: Tensor) -> str:
    """Hash dtype, shape and bytes of a tensor, as `mark`."""
    return mark(tensor, whole=False).sha256


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, in the same memory; other tensors as they are."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    module = sys.modules.get("torch.distributed.tensor")  # without it there is no DTensor
    return module is not None and isinstance(tensor, module.DTensor)


def _hash_bytes(tensor: Tensor, label: str) -> str:
    digest = hashlib.sha256(label.encode())
    if tensor.numel():
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def hash_text(text: str) -> str:
    """Hash a text: 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def distance(one: TensorSketch, other: TensorSketch) -> float:
    """Estimate the L2 distance of two tensors; exactly 0 where the bits are the same."""
    if one.sha256 == other.sha256:
        return 0.0
    pairs = zip(_unpacked(one), _unpacked(other), strict=True)
    return math.hypot(*(a - b for a, b in pairs))


def relative_distance(pairs: Iterable[tuple[TensorSketch, TensorSketch]]) -> float:
    """Estimate how far two lists of tensors are apart, relative to the first one's norm."""
    found = [(distance(one, other), one.norm) for one, other in pairs]
    apart, size = math.hypot(*(d for d, _ in found)), math.hypot(*(norm for _, norm in found))
    if apart == 0:
        return 0.0
    return apart / size if size else math.inf


def best_factor(pairs: Iterable[tuple[TensorSketch, TensorSketch]]) -> tuple[float, float]:
    """Find by what the second tensors have to be multiplied to come closest to the first.

    Returns:
        The factor, and how far apart they are then, relative to the first one's norm; NaN and
        infinity where all are zero.
    """
    marks = [(_unpacked(one), _unpacked(other)) for one, other in pairs]
    ours = [value for one, _ in marks for value in one]
    theirs = [value for _, other in marks for value in other]
    mine, size = math.hypot(*ours), math.hypot(*theirs)
    if not mine or not size:
        return math.nan, math.inf
    # Least squares: minimise |ours - factor * theirs|.
    factor = sum(a * b for a, b in zip(ours, theirs, strict=True)) / size**2
    rest = math.hypot(*(a - factor * b for a, b in zip(ours, theirs, strict=True)))
    return factor, rest / mine


def _unpacked(sketch: TensorSketch) -> tuple[float, ...]:
    return _PACKING.unpack(base64.b64decode(sketch.sketch))


@cache
def sign_block() -> Tensor:
    """Give (_BLOCK,) float64 of 1 and -1, the same in every process."""
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(0, 2, (_BLOCK,), generator=generator)
    return drawn.to(torch.float64) * 2 - 1


_MAX_BYTES = 1 << 20
_PADDING = (0.0, 1.0, -1.0, -100.0)
"""What sequences are usually padded with: tokens, masks and targets."""


def content_hashes(content: object, samples: int) -> tuple[str, ...]:
    """Hash each sample of a batch. Blocks for its copy to the CPU.

    Sequences are padded to the longest of their batch, at one end. What they are padded with isn't
    known, so each tensor of a sample that may be one has three hashes: without the repetitions of
    its last value, without those of its first one, and whole (see `contents_match`).

    Args:
        content: Tensors whose first dimension is samples; in tuples, lists and dictionaries.
        samples: How many there are; 0 where it isn't known.

    Returns:
        8 hexadecimal digits each, of sequences more, the first of which are for `identity`; nothing
        where no tensor has so many rows.
    """
    rows = samples or next((len(t) for t in _tensors(content)), 0)
    columns = [t.detach().cpu().contiguous() for t in _tensors(content) if len(t) == rows]
    if not columns or not rows:
        return ()
    return tuple(_hashes([column[row] for column in columns]) for row in range(rows))


def all_finite(content: object) -> bool:
    """Return whether all floating-point tensors of a batch are finite."""
    return all(bool(t.isfinite().all()) for t in _tensors(content) if t.is_floating_point())


def contents_match(one: str, other: str) -> bool:
    """Return whether two samples have equal values, by their hashes, apart from padding."""
    # Each tensor by itself; the samples as a whole have the first hash.
    parts = [[set(part.split(".")) for part in content.split("-")] for content in (one, other)]
    mine, theirs = (part[1:] or part for part in parts)
    return len(mine) == len(theirs) and all(a & b for a, b in zip(mine, theirs, strict=True))


def identity(content: str) -> str:
    """Return the hash by which a sample is known that has no index: without usual padding."""
    return content.partition("-")[0]


def _hashes(parts: list[Tensor]) -> str:
    if not any(map(_is_sequence, parts)):
        return _hash(parts)
    own = (".".join(_hash([form]) for form in _forms(part)) for part in parts)
    return "-".join((_hash([_unpadded(part) for part in parts]), *own))


def _hash(parts: list[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for part in parts:
        digest.update(part.reshape(-1).float().numpy().tobytes()[:_MAX_BYTES])
    return digest.hexdigest()


def _is_sequence(sample: Tensor) -> bool:
    return sample.ndim in (1, 2) and len(sample) > 1 and sample.numel() > 0


def _forms(sample: Tensor) -> Iterator[Tensor]:
    """Return a sample whole, and a sequence without its last and its first value's run as well."""
    yield sample
    if _is_sequence(sample):
        rows = sample.reshape(len(sample), -1)
        yield _trimmed(sample, (rows != rows[-1]).any(1), begin=False)
        yield _trimmed(sample, (rows != rows[0]).any(1), end=False)


def _unpadded(sample: Tensor) -> Tensor:
    """Cut usual padding off both ends of a sequence of numbers or of features."""
    if not _is_sequence(sample):
        return sample
    rows = sample.reshape(len(sample), -1)
    padding = torch.tensor(_PADDING, dtype=rows.dtype if rows.is_floating_point() else torch.long)
    return _trimmed(sample, ~torch.isin(rows.to(padding.dtype), padding).all(1))


def _trimmed(sample: Tensor, kept: Tensor, *, begin: bool = True, end: bool = True) -> Tensor:
    """Cut off the rows before the first that is kept, and those behind the last."""
    places = kept.nonzero()
    if not len(places):
        return sample[:0]
    return sample[int(places[0]) * begin : int(places[-1]) + 1 if end else None]


def _tensors(content: object) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        if content.ndim and not content.is_complex():
            yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _tensors(value)
