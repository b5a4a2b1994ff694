"""A backend that offers no more than SageMaker's and refuses everything else, carried by Gloo.

Registered through PyTorch's own interface for backends, as SageMaker's library registers its own.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

NAME = "smddp"
DEVICES = ["cpu", "cuda"]  # SageMaker's: cuda alone
CALLS: list[str] = []
"""What was called in this process."""


class FewOperations(dist.ProcessGroup):
    """Five collectives over the whole group, sums only. PyTorch calls these methods by name."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        # Its collectives aren't declared, though the class has them.
        self._inner: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        return NAME

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # The declared signatures have overloads; PyTorch's C++ side calls these forms alone.
    def allreduce(self, tensors: list[Tensor], options: object) -> object:  # type: ignore[override]
        only_sums(options)
        CALLS.append("all_reduce")
        return self._inner.allreduce(tensors, options)

    def reduce(self, tensors: list[Tensor], options: object) -> object:  # type: ignore[override]
        only_sums(options)
        CALLS.append("reduce")
        return self._inner.reduce(tensors, options)

    def broadcast(self, tensors: list[Tensor], options: object) -> object:  # type: ignore[override]
        CALLS.append("broadcast")
        return self._inner.broadcast(tensors, options)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: object
    ) -> object:
        CALLS.append("all_gather")
        return self._inner.allgather(outputs, inputs, options)

    def barrier(self, options: object) -> object:  # type: ignore[override]
        CALLS.append("barrier")
        return self._inner.barrier(options)


def refuse(*_: object) -> NoReturn:
    raise RuntimeError("SMDDP does not support: this operation")


for name in (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
    "recv",
    "recv_anysource",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "split_group",
):
    setattr(FewOperations, name, refuse)


def only_sums(options: object) -> None:
    operation = getattr(options, "reduceOp", dist.ReduceOp.SUM)
    if operation != dist.ReduceOp.SUM:
        raise RuntimeError("SMDDP does not support: ReduceOp")


def make(store: Store, rank: int, size: int, timeout: timedelta) -> FewOperations:
    made: object = dist.distributed_c10d._world.pg_map
    if made:
        raise RuntimeError("SMDDP does not support: subgroups, or another backend beside it")
    return FewOperations(store, rank, size, timeout)


def register() -> None:
    """Make the stand-in known to PyTorch, as importing SageMaker's module does with its own."""
    dist.Backend.register_backend(NAME, make, devices=DEVICES)


def install(directory: Path) -> Path:
    """Write a package of SageMaker's name that registers the stand-in when it is imported.

    Returns:
        What to put on PYTHONPATH.
    """
    package = directory / "smdistributed" / "dataparallel" / "torch"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    code = "from tests.support.standin import register\n\nregister()\n"
    (package / "torch_smddp.py").write_text(code)
    return directory
