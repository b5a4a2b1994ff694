"""Compares what has to be the same on all workers, bit by bit, and names who has drifted."""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.gradient_sync.name_list import list_names
from paceline.gradient_sync.tensor_hash import hash_bits

_SHOWN = 3


@final
class ReplicaConsistency:
    """Compares parameters and learning rates every few steps.

    All workers update their weights themselves, from the same gradients. Where one of them computes
    something else (a faulty device, a script that changes weights on one rank), every later step
    mixes two models without a word.
    """

    def __init__(
        self,
        group: Group,
        every: int,
        parameters: Callable[[], Mapping[str, Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Args:
        group: The workers.
        every: Steps between two comparisons; 0 for never.
        parameters: Names what has to be the same; asked anew each time.
        optimizers: Whose learning rates have to be; may still grow.
        """
        self._group = group
        self._every = every
        self._parameters = parameters
        self._optimizers = optimizers

    def look(self, step: int) -> None:
        """Compare where this step is due. Collective then, with one wait for the device.

        Args:
            step: Complete steps; the same on every worker.

        Raises:
            JobError: Workers have drifted; names their ranks, hosts and the first differences.
        """
        if self._every and step % self._every == 0:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare now, unless it is never done. Collective; raises as `look`."""
        if not self._every or self._group.world_size == 1:
            return
        parameters, rates = self._parameters(), _rates(self._optimizers)
        rows = self._group.gather_rows(_row(parameters, rates))  # (world_size, K)
        if bool((rows == rows[0]).all()):
            return
        strange = drifted(rows.tolist())
        hosts = self._group.hosts()
        raise JobError(_message(step, strange, hosts, rows, [*parameters, *rates]))


def drifted(rows: Sequence[Sequence[int]]) -> list[int]:
    """Tell which ranks differ from the majority; all of them where there is none. Pure.

    Args:
        rows: What each rank has, in rank order.
    """
    having: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(rows):
        having.setdefault(tuple(row), []).append(rank)
    largest = max(having.values(), key=len)
    if 2 * len(largest) <= len(rows):
        return list(range(len(rows)))
    return [rank for rank in range(len(rows)) if rank not in largest]


def _row(parameters: Mapping[str, Tensor], rates: Mapping[str, float]) -> Tensor:
    """Make this worker's row: (K,) int64 on the CPU."""
    hashes = [hash_bits(parameter) for parameter in parameters.values()]
    own = torch.tensor(list(rates.values()), dtype=torch.float64).view(torch.int64)
    devices = {one.device for one in hashes}
    if len(devices) != 1:  # none, or a model on several devices
        return torch.cat([torch.tensor([int(one) for one in hashes], dtype=torch.int64), own])
    return torch.cat([torch.stack(hashes).cpu(), own])


def _rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Name the learning rates of all groups of parameters."""
    found = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            which = f"optimizer {number}, " if len(optimizers) > 1 else ""
            which += f"group {place}" if len(optimizer.param_groups) > 1 else ""
            name = f"learning rate ({which.rstrip(', ')})" if which else "learning rate"
            found[name] = float(group.get("lr", 0.0))
    return found


def _message(
    step: int, strange: Sequence[int], hosts: Sequence[str], rows: Tensor, names: Sequence[str]
) -> str:
    """Say who has drifted, and in what: from the first worker that hasn't, or from rank 0."""
    right = next((rank for rank in range(len(hosts)) if rank not in strange), 0)
    who = list_names([f"rank {rank} on {hosts[rank]}" for rank in strange], _SHOWN)
    differ = (rows != rows[right]).any(0).tolist()
    listed = [name for name, differs in zip(names, differ, strict=True) if differs]
    shown = ", ".join(listed[:_SHOWN])
    rest = f" and {len(listed) - _SHOWN} more of {len(names)}" if len(listed) > _SHOWN else ""
    verb = "has" if len(strange) == 1 else "have"
    when = f"after step {step}" if step else "at the start"
    from_whom = "from the others" if right not in strange else "from each other"
    remedy = "leave that host out" if len(set(hosts)) > 1 else "try another machine"
    return (
        f"{when} {who} {verb} drifted {from_whom}: {shown}{rest} "
        f"{'differs' if len(listed) == 1 else 'differ'} in their bits. Either the script changes "
        "weights or rates on some ranks alone, or a device computes wrongly. The newest snapshot "
        f"may be from before: see `paceline resume`, and {remedy} if it happens again"
    )
