"""SignSGD with majority vote (Bernstein et al., 2018, arXiv:1802.04434, algorithm 1)."""

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.errors import UsageError
from paceline.gradient_sync.network_model import ring_bytes
from paceline.training.sync.allreduce import ReplicaSync


@final
class SignSync(ReplicaSync):
    """Every worker votes with the signs of its gradients."""

    def setup(self, step: int) -> None:
        """Put votes in the place of averages.

        Raises:
            UsageError: There is a loss scaler: it would divide signs, and miss an overflow.
        """
        if self.context.scaler is not None:
            raise UsageError(
                "--sync signs can't be combined with --precision fp16, whose loss scaler needs "
                "gradients in full. Use --precision bf16 or fp32"
            )
        for replica in self.replicas:
            replica.defer_to(MajorityVote(self.context.group))


@final
class MajorityVote:
    """Counts votes; int8 can carry those of 127 workers."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def average_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace each gradient by the sign that most workers have; 0 in a tie."""
        for gradient in gradients.values():
            votes = gradient.sign().to(torch.int8)
            gradient.copy_(self._group.sum_(votes).sign())

    def wire_bytes(self, tensors: Sequence[Tensor]) -> float:
        """Count a byte for each element."""
        return ring_bytes(sum(tensor.numel() for tensor in tensors), self._group.world_size)
