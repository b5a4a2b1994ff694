"""The same module on every worker."""

import torch
from torch import nn

from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.gradient_sync.name_list import list_names


@torch.no_grad()
def agree_on_weights(module: nn.Module, group: Group) -> None:
    """Compare the workers' modules by name and shape, and give all of them rank 0's. Collective.

    Raises:
        JobError: They differ.
    """
    if group.world_size == 1:
        return
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    described = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in state.items()]
    lists = [text.splitlines() for text in group.gather_texts("\n".join(described))]
    for rank, other in enumerate(lists):
        different = [a for a in lists[0] if a not in other] + [
            b for b in other if b not in lists[0]
        ]
        if different or other != lists[0]:
            hosts = group.hosts()
            raise JobError(
                f"the models of rank 0 on {hosts[0]} and rank {rank} on {hosts[rank]} differ: "
                f"{list_names(different) or 'order'}. Every worker must build the same model"
            )
    for tensor in state.values():
        group.broadcast_(tensor.detach())
