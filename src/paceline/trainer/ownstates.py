"""Brings together what each worker has of its own: tensors by name, and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from paceline.dist.group import Group

_CHUNK_BYTES = 4 << 20
"""Of each worker at once, so that one which keeps nothing needs little memory."""


@final
@dataclass(frozen=True, kw_only=True)
class OwnState:
    """What one worker has of its own."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, object] = field(default_factory=dict)
    """JSON."""


def gather_states(group: Group, own: OwnState, *, keeps: bool) -> list[OwnState]:
    """Collect what each worker has. Collective, bit for bit; names may differ between workers.

    Args:
        group: The workers.
        own: Of this one, on any device.
        keeps: Whether this worker wants the result.

    Returns:
        In rank order, on the CPU; nothing on a worker that doesn't keep it.
    """
    described = [[n, str(t.dtype), list(t.shape)] for n, t in own.tensors.items()]
    told = group.gather_texts(json.dumps([described, dict(own.values)]))
    parts = [_bytes_of(tensor) for tensor in own.tensors.values()]
    row = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    most = int(group.gather_rows(torch.tensor([row.numel()])).max())
    row = torch.nn.functional.pad(row, (0, most - row.numel()))
    kept = torch.empty(group.world_size, most if keeps else 0, dtype=torch.uint8)
    for begin in range(0, most, _CHUNK_BYTES):
        rows = group.gather_rows(row[begin : begin + _CHUNK_BYTES])
        if keeps:
            kept[:, begin : begin + rows.shape[1]] = rows
    if not keeps:
        return []
    return [_taken_apart(text, row) for text, row in zip(told, kept, strict=True)]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _taken_apart(text: str, row: Tensor) -> OwnState:
    described, values = json.loads(text)
    tensors, at = {}, 0
    for name, dtype, shape in described:
        like = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
        # A copy: the bytes may begin anywhere, which no other type could be read from.
        part = row[at : at + like.nbytes].clone()
        tensors[name] = part.view(like.dtype).view(shape)
        at += like.nbytes
    return OwnState(tensors=tensors, values=values)


def merged(states: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Put JSON objects together; of what several have, that of the first counts. Pure."""
    found: dict[str, object] = {}
    for state in states:
        found = {**state, **found}
    return found
