"""Averages optimizers' states over the workers after local steps."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.flatten import flatten_optimizer, restore_optimizer
from paceline.distributed.group import Group
from paceline.gradient_sync.buffers import pack, unpack
from paceline.gradient_sync.network_model import ring_bytes
from paceline.training.snapshots.per_worker_states import RankState, gather_states, merged

_CHUNK_ELEMENTS = 1 << 23
_COUNT = "step"
"""The slot in which optimizers count: a mean of it may be no whole number."""


def mean_state(states: Sequence[RankState]) -> RankState:
    """Average optimizers' states, as `flatten_optimizer` gives them. Pure.

    A tensor is averaged over the workers that have it. Of counts, and of what isn't a number of
    floating point, that of the first worker which has it is taken.
    """
    names = dict.fromkeys(name for state in states for name in state.tensors)
    tensors = {}
    for name in names:
        held = [state.tensors[name] for state in states if name in state.tensors]
        tensors[name] = held[0]
        if _is_averaged(name, held[0]):
            total = torch.stack([one.double() for one in held]).mean(0)
            tensors[name] = total.to(held[0].dtype)
    values = dict(states[0].values)
    slots = [state.values.get("values") for state in states]
    values["values"] = merged([one for one in slots if isinstance(one, Mapping)])
    return RankState(tensors=tensors, values=values)


@final
class OptimizerAverager:
    """Gives all workers' optimizers the same state."""

    def __init__(self, group: Group) -> None:
        """Connect nothing yet: the group is there."""
        self.sent_bytes = 0.0
        """What this worker has sent for it, on the wire."""
        self._group = group

    @torch.no_grad()
    def agree(self, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace an optimizer's state by the mean of all workers'. Collective.

        Args:
            optimizer: Of this worker.
            parameters: Of the models, by name.
        """
        slots, values = flatten_optimizer(optimizer, parameters.items())
        described = {
            name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in slots.items()
        }
        text = json.dumps([described, values])
        digest = torch.frombuffer(
            bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8
        )
        rows = self._group.gather_rows(digest)
        if bool((rows == rows[0]).all()):
            self._average(slots)
            return
        # A parameter may have had no gradient on some workers, and so no state.
        own = RankState(tensors=slots, values=values)
        common = mean_state(gather_states(self._group, own, keeps=True))
        restore_optimizer(optimizer, parameters.items(), common.tensors, common.values)

    def _average(self, slots: Mapping[str, Tensor]) -> None:
        means = [tensor for name, tensor in slots.items() if _is_averaged(name, tensor)]
        others = [tensor for name, tensor in slots.items() if not _is_averaged(name, tensor)]
        for chunk in _chunks(means):
            wide = torch.promote_types(chunk[0].dtype, torch.float32)
            flat = torch.cat([tensor.flatten().to(wide) for tensor in chunk])
            self._group.sum_(flat).div_(self._group.world_size)
            self.sent_bytes += ring_bytes(flat.nbytes, self._group.world_size)
            parts = flat.split([tensor.numel() for tensor in chunk])
            for tensor, part in zip(chunk, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))
        if others:
            unpack(self._group.broadcast_(pack(others)), others)


def _is_averaged(name: str, tensor: Tensor) -> bool:
    of_parameter = not name.startswith("/")  # else an option of a group: a learning rate
    counts = name.rpartition("/")[2] == _COUNT
    return of_parameter and tensor.is_floating_point() and not counts


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Put tensors of one type and device together, so that few messages carry them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    # Full chunks, so that no message needs memory for all of the state.
    for alike in kinds.values():
        chunk: list[Tensor] = []
        elements = 0
        for tensor in alike:
            if chunk and elements + tensor.numel() > _CHUNK_ELEMENTS:
                yield chunk
                chunk, elements = [], 0
            chunk.append(tensor)
            elements += tensor.numel()
        if chunk:
            yield chunk
