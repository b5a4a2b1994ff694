"""What samples look like: a hash of each row of a batch."""

import hashlib
from collections.abc import Iterator, Mapping

from torch import Tensor

_MOST_BYTES = 1 << 20


def content_hashes(content: object, samples: int) -> tuple[str, ...]:
    """Hash each sample of a batch. Blocks for its copy to the CPU.

    Args:
        content: Tensors whose first dimension is samples; in tuples, lists and dictionaries.
        samples: How many there are; 0 where it isn't known.

    Returns:
        8 hexadecimal digits each; nothing where no tensor has so many rows.
    """
    rows = samples or next((len(t) for t in _tensors(content)), 0)
    columns = [t.detach().cpu().contiguous() for t in _tensors(content) if len(t) == rows]
    if not columns or not rows:
        return ()
    return tuple(_hash([column[row] for column in columns]) for row in range(rows))


def _hash(parts: list[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for part in parts:
        digest.update(part.reshape(-1).float().numpy().tobytes()[:_MOST_BYTES])
    return digest.hexdigest()


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
