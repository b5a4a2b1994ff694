"""Gathers the workers' own states on all workers: tensors by name, and JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from paceline.distributed.device_copies import cut, join
from paceline.distributed.group import Group

_CHUNK_BYTES = 4 << 20
"""Of each worker at once."""


@final
@dataclass(frozen=True, kw_only=True)
class RankState:
    """One worker's own state."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, object] = field(default_factory=dict)
    """JSON."""


def gather_states(group: Group, own: RankState, *, keeps: bool) -> list[RankState]:
    """Collect what each worker has. Collective, bit for bit; names may differ between workers.

    A few tensors at a time, so that a worker which keeps nothing needs little memory.

    Args:
        own: Of this one, on any device.

    Returns:
        In rank order, on the CPU; nothing on a worker that doesn't keep it.
    """
    described = [[n, str(t.dtype), list(t.shape)] for n, t in own.tensors.items()]
    texts = group.gather_texts(json.dumps([described, dict(own.values)]))
    everyone = [json.loads(text) for text in texts]
    likes = [{name: _like(dtype, shape) for name, dtype, shape in each} for each, _ in everyone]
    gathered: list[dict[str, Tensor]] = [{} for _ in everyone]
    for message in _messages(likes):
        named = [[name for name in message if name in like] for like in likes]
        row = torch.zeros(sum(message.values()), dtype=torch.uint8)
        if mine := [own.tensors[name].cpu() for name in named[group.rank]]:
            row[: sum(tensor.nbytes for tensor in mine)] = join(mine)
        rows = _gathered(group, row, keeps=keeps)
        if keeps:
            for tensors, like, names, theirs in zip(gathered, likes, named, rows, strict=True):
                # A copy: the row may begin anywhere, where no other type could be read from.
                tensors |= zip(names, cut(theirs.clone(), [like[n] for n in names]), strict=True)
    if not keeps:
        return []
    # In the order in which each worker has named them.
    return [
        RankState(tensors={name: tensors[name] for name in like}, values=values)
        for tensors, like, (_, values) in zip(gathered, likes, everyone, strict=True)
    ]


def _like(dtype: str, shape: list[int]) -> Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")


def _messages(likes: Sequence[Mapping[str, Tensor]]) -> Iterator[dict[str, int]]:
    """Put tensors together that travel at once: names and the most bytes any worker has of each."""
    message: dict[str, int] = {}
    for name in dict.fromkeys(name for like in likes for name in like):
        size = max(like[name].nbytes for like in likes if name in like)
        if message and sum(message.values()) + size > _CHUNK_BYTES:
            yield message
            message = {}
        message[name] = size
    if message:
        yield message


def _gathered(group: Group, row: Tensor, *, keeps: bool) -> Tensor:
    """Collect bytes in pieces: (workers, K) on one that keeps them, (workers, 0) else."""
    kept = torch.empty(group.world_size, row.numel() if keeps else 0, dtype=torch.uint8)
    for begin in range(0, row.numel(), _CHUNK_BYTES):
        rows = group.gather_rows(row[begin : begin + _CHUNK_BYTES])
        if keeps:
            kept[:, begin : begin + rows.shape[1]] = rows
    return kept


def merged(states: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Put JSON objects together; of what several have, that of the first counts. Pure."""
    nested: dict[str, object] = {}
    for state in states:
        nested = {**state, **nested}
    return nested
