"""Makes parameters equal on all workers at the start, and compares them bit by bit later.

An error names who has drifted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.gradient_sync.name_list import list_names

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
        """Create the replica consistency.

        Args:
            group: The workers.
            every: Steps between two comparisons by `check`; 0 for none.
            parameters: Names what has to be the same; asked anew each time.
            optimizers: Whose learning rates have to be; may still grow.
        """
        self._group = group
        self._every = every
        self._parameters = parameters
        self._optimizers = optimizers

    def check(self, step: int) -> None:
        """Compare where this step is due. Collective then, with one wait for the device.

        Args:
            step: Complete steps; the same on every worker.

        Raises:
            JobError: Workers have drifted; names their ranks, hosts and the first differences.
        """
        if self._every and step % self._every == 0:
            self.compare(step)

    def compare(self, step: int) -> None:
        """Compare now. Collective; raises as `check`."""
        self._compare(step, self._parameters())

    def compare_rates(self, step: int) -> None:
        """Compare the learning rates alone, which waits for no device; else as `compare`."""
        self._compare(step, {})

    def _compare(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        if self._group.world_size == 1:
            return
        # One row of hashes and learning rates from each worker; equal rows are all there is to
        # check.
        rates = _rates(self._optimizers)
        rows = self._group.gather_rows(_row(parameters, rates))  # (world_size, K)
        if bool((rows == rows[0]).all()):
            return
        differing = drifted(rows.tolist())
        hosts = self._group.hosts()
        raise JobError(_message(step, differing, hosts, rows, [*parameters, *rates]))


def drifted(rows: Sequence[Sequence[int]]) -> list[int]:
    """Tell which ranks differ from the majority; all of them where there is none. Pure.

    Args:
        rows: What each rank has, in rank order.
    """
    having: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(rows):
        having.setdefault(tuple(row), []).append(rank)
    largest = max(having.values(), key=len)
    # No majority: nobody can say who is right.
    if 2 * len(largest) <= len(rows):
        return list(range(len(rows)))
    return [rank for rank in range(len(rows)) if rank not in largest]


def _row(parameters: Mapping[str, Tensor], rates: Mapping[str, float]) -> Tensor:
    """Make this worker's row: (K,) int64 on the CPU."""
    hashes = [hash_bits(parameter) for parameter in parameters.values()]
    # Rates are compared by their bits, like the weights.
    own = torch.tensor(list(rates.values()), dtype=torch.float64).view(torch.int64)
    # One transfer for all hashes of a device, instead of one wait for each.
    devices = {one.device for one in hashes}
    if len(devices) != 1:  # none, or a model on several devices
        return torch.cat([torch.tensor([int(one) for one in hashes], dtype=torch.int64), own])
    return torch.cat([torch.stack(hashes).cpu(), own])


def _rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Name the learning rates of all groups of parameters."""
    rates = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            which = f"optimizer {number}, " if len(optimizers) > 1 else ""
            which += f"group {place}" if len(optimizer.param_groups) > 1 else ""
            name = f"learning rate ({which.rstrip(', ')})" if which else "learning rate"
            rates[name] = float(group.get("lr", 0.0))
    return rates


def _message(
    step: int, differing: Sequence[int], hosts: Sequence[str], rows: Tensor, names: Sequence[str]
) -> str:
    """Say who has drifted, and in what: from the first worker that hasn't, or from rank 0."""
    # Compare with a worker that counts as right: one of the majority.
    right = next((rank for rank in range(len(hosts)) if rank not in differing), 0)
    who = list_names([f"rank {rank} on {hosts[rank]}" for rank in differing], _SHOWN)
    differ = (rows != rows[right]).any(0).tolist()
    listed = [name for name, differs in zip(names, differ, strict=True) if differs]
    shown = ", ".join(listed[:_SHOWN])
    rest = f" and {len(listed) - _SHOWN} more of {len(names)}" if len(listed) > _SHOWN else ""
    verb = "has" if len(differing) == 1 else "have"
    when = f"after step {step}" if step else "at the start"
    from_whom = "from the others" if right not in differing else "from each other"
    remedy = "leave that host out" if len(set(hosts)) > 1 else "try another machine"
    return (
        f"{when} {who} {verb} drifted {from_whom}: {shown}{rest} "
        f"{'differs' if len(listed) == 1 else 'differ'} in their bits. Either the script changes "
        "weights or rates on some ranks alone (by random numbers or figures that each rank has for "
        "itself, say), or a device computes wrongly. The newest snapshot "
        f"may be from before: see `paceline resume`, and {remedy} if it happens again"
    )


_CHUNK = 1 << 20
_NEXT_CHUNK = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number: by it the sum so far is multiplied before the next chunk comes."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits on its device, without waiting for it.

    The sum of (2i + 1) * bits_i over the elements of each million, in whole numbers modulo 2**64:
    it is exact, so that no order of summing changes it, and odd weights let no change of one
    element go unseen. Three operations for each million, or part of it.

    Args:
        tensor: Of any shape and type.

    Returns:
        () int64, on the tensor's device.
    """
    bits = _bits(tensor.detach())  # (N,)
    weights = torch.arange(1, 2 * max(1, min(len(bits), _CHUNK)), 2, device=bits.device)
    total = bits.new_zeros((), dtype=torch.int64)
    for chunk in bits.split(_CHUNK):
        total = (chunk * weights[: len(chunk)]).sum().add(total, alpha=_NEXT_CHUNK)
    return total


def _bits(tensor: Tensor) -> Tensor:
    """Give the elements as whole numbers: (N,), of their own size or of 8 bytes."""
    flat = tensor.flatten() if tensor.is_contiguous() else tensor.contiguous().flatten()
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int64))


@torch.no_grad()
def agree_on_weights(module: nn.Module, group: Group) -> None:
    """Compare the workers' modules by name and shape, and give all of them rank 0's. Collective.

    Raises:
        JobError: They differ.
    """
    if group.world_size == 1:
        return
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    # Names and shapes first: a broadcast between different modules would hang or mix up tensors.
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
