"""Options of the process group and the device."""

from dataclasses import dataclass
from typing import Literal

from paceline.distributed.address import parse_init_method
from paceline.errors import UsageError
from paceline.options.durations import MAX_WAIT_S

FEW_OPERATIONS = frozenset({"mpi", "smddp"})
"""Backends that can all_reduce, broadcast, reduce, all_gather and barrier, and no more: no half
precision, no all-to-all, no subgroups, no gathering into one tensor, no reduction but the sum."""

Backend = Literal["auto", "nccl", "gloo", "mpi", "xccl", "smddp"]
DeviceKind = Literal["auto", "cpu", "cuda", "xpu", "mps"]

_CPU_CANT = {"nccl": "GPUs", "xccl": "Intel GPUs"}


@dataclass(frozen=True, kw_only=True)
class DistOptions:
    """How workers reach each other and what they compute on."""

    init_method: str | None = None
    """Where workers meet, as in PyTorch: env:// (MASTER_ADDR and MASTER_PORT in the environment),
    tcp://HOST:PORT (of rank 0) or file:///PATH (a new file that all workers reach). Default: as
    the launcher says. With --rank and --world-size each worker is started by hand."""

    rank: int | None = None
    """This worker's number over all nodes, from 0, where you start each worker by hand. Default:
    as torchrun, Slurm, MPI, Kubernetes, SageMaker or SkyPilot says."""

    world_size: int | None = None
    """Workers over all nodes, where you start each worker by hand."""

    local_rank: int | None = None
    """This worker's number on its node, from 0, where you start each worker by hand: it picks the
    GPU."""

    interface: str | None = None
    """Network interface for the workers' sockets, such as eth0. Default: GLOO_SOCKET_IFNAME where
    it is set, else the one on the route to rank 0."""

    backend: Backend = "auto"
    """What carries the gradients. auto: nccl between GPUs, gloo between CPU workers. mpi needs a
    PyTorch built with it, xccl is for Intel GPUs, smddp is SageMaker's."""

    device: DeviceKind = "auto"
    """What a worker computes on. auto: its own GPU where there is one, else the CPU; with
    `--backend gloo` or mpi the CPU. Intel's GPUs (xpu) and Apple's (mps, by one worker) are used
    where they are asked for. With `--device cuda --backend gloo` there may be more workers than
    GPUs, which then share them: no faster, and good for trying things out."""

    timeout_s: float = 300.0
    """Seconds after which a worker that waits for the others gives up, so that a hang becomes an
    error. Raise it where one step or one evaluation takes longer than this."""

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s <= MAX_WAIT_S:
            raise UsageError(
                f"--timeout-s must be greater than 0 and at most {MAX_WAIT_S:,.0f} (ten days), "
                f"not {self.timeout_s}"
            )
        if self.backend in _CPU_CANT and self.device == "cpu":
            raise UsageError(
                f"--backend {self.backend} needs {_CPU_CANT[self.backend]}; "
                "with --device cpu use --backend gloo"
            )
        if self.device == "mps" and self.backend not in ("auto", "gloo"):
            raise UsageError(
                f"--backend {self.backend} doesn't go with --device mps, where one worker trains "
                "alone: leave it out"
            )
        if self.init_method is not None:
            parse_init_method(self.init_method)
        self._check_place()

    @property
    def shares_gpus(self) -> bool:
        """Whether there may be more workers than GPUs: NCCL lets each GPU take part once."""
        return self.device == "cuda" and self.backend == "gloo"

    def _check_place(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            raise UsageError(
                "a worker started by hand needs both --rank and --world-size "
                "(and --init-method tcp://HOST:PORT, the same for all)"
            )
        if self.local_rank is not None and self.rank is None:
            raise UsageError("--local-rank goes with --rank and --world-size")
        if self.rank is None or self.world_size is None:
            return
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"--rank {self.rank} is none of --world-size {self.world_size} workers: "
                "ranks count from 0"
            )
        if not 0 <= (self.local_rank or 0) < self.world_size:
            raise UsageError(f"--local-rank is {self.local_rank}; local ranks count from 0")


def refuse_several_on_mps(workers: int) -> None:
    """Refuse more than one worker on Apple's GPUs.

    Gloo carries no tensors of theirs (pytorch/pytorch#160732, open in torch 2.15), and a Mac has
    one.

    Raises:
        UsageError: There are more.
    """
    if workers > 1:
        raise UsageError(
            f"{workers} workers with --device mps: PyTorch has no backend that carries gradients "
            "between Apple's GPUs, so that one worker trains alone there. Use --workers 1 on one "
            "machine, or --device cpu"
        )


OF_THIS_PROCESS = ("init_method", "rank", "world_size", "local_rank", "interface")
"""Options that say where this very process stands: they aren't taken over by a resume."""
