"""Options of the process group and the device."""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError

Backend = Literal["auto", "nccl", "gloo"]
DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class DistOptions:
    """How workers reach each other and what they compute on."""

    backend: Backend = "auto"
    """What carries the gradients. auto: nccl between GPUs, gloo between CPU workers."""

    device: DeviceKind = "auto"
    """What a worker computes on. auto: its own GPU where there is one, else the CPU; with
    `--backend gloo` the CPU."""

    timeout_s: float = 300.0
    """Seconds after which a worker that waits for the others gives up, so that a hang becomes an
    error. Raise it where one step or one evaluation takes longer than this."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise UsageError(f"--timeout-s must be greater than 0, not {self.timeout_s}")
        if self.backend == "nccl" and self.device == "cpu":
            raise UsageError("--backend nccl needs GPUs; with --device cpu use --backend gloo")
