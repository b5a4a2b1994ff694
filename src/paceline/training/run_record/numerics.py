"""Hardware and library settings that results depend on: pinned if possible, else recorded.

A training whose steps were computed with different ones is mixed: `run.json` tells.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import final

import numpy as np
import torch

from paceline.distributed.device import cpu_name, describe_device, has_cudnn, is_accelerator
from paceline.distributed.environment import numeric_variables, set_variables
from paceline.distributed.group import Group
from paceline.distributed.system_gpus import driver_version
from paceline.errors import JobError, UsageError
from paceline.results.run_directory import RunDirectory
from paceline.training.options import ComputeOptions

Numerics = Mapping[str, str | int]

_WORKSPACES = (":4096:8", ":16:8")
"""cuBLAS is deterministic with these:
https://docs.nvidia.com/cuda/cublas/#results-reproducibility."""
_WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_MAX_SHAPES = 256
_UNKNOWN = "unknown"
"""Noted for what couldn't be read: no difference to what can be read today."""
_TINY = 1e-40
"""Below the smallest normal number of fp32."""


def pin(threads: int | None) -> None:
    """Make everything in this process compute the same bits every time. Before CUDA starts.

    Args:
        threads: CPU threads of a worker; 1 where nobody says, since sums are split by threads and
            a share of the cores would depend on the number of workers.

    Raises:
        UsageError: The environment asks for something that isn't deterministic.
    """
    pin_kernels()
    torch.set_num_threads(threads or 1)
    torch.set_flush_denormal(False)
    _pin_compiler()


def pin_kernels() -> None:
    """Turn on deterministic algorithms. Called before CUDA is initialized.

    Raises:
        UsageError: The environment asks for something that isn't deterministic.
    """
    _pin_workspace()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module with properties
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True


def choose_kernels(options: ComputeOptions, *, pinned: bool) -> None:
    """Choose a worker's kernels where there are several; without options all stays as it is.

    cuDNN's benchmark is no default: what it finds is hardly faster than cuDNN's own choice, and
    it costs up to seconds at each new shape of a batch (benchmarks/README.md, "On GPUs").

    Args:
        options: Of which `deterministic`, `cudnn_benchmark` and `tf32` count.
        pinned: `pin` has chosen them already.

    Raises:
        UsageError: As `pin_kernels`.
    """
    if options.deterministic and not pinned:
        pin_kernels()
    elif options.cudnn_benchmark is not None and not pinned:
        torch.backends.cudnn.benchmark = options.cudnn_benchmark
    # By the names that all versions of torch have; set alike, both generations can be read.
    if options.tf32 != "auto":
        torch.backends.cuda.matmul.allow_tf32 = options.tf32 == "on"
        torch.backends.cudnn.allow_tf32 = options.tf32 != "off"


def describe_kernels(device: torch.device) -> str:
    """Say which kernels a worker takes, such as `cuDNN's choice, TF32 in convolutions`.

    Empty where there is no choice.
    """
    if not has_cudnn(device):
        return ""
    switches, precisions = _switches(), _precisions(device)
    cudnn = "cuDNN's fastest" if switches["cudnn_benchmark"] == "yes" else "cuDNN's choice"
    if switches["deterministic_algorithms"] == "yes":
        cudnn = "the same bits every time"
    in_tf32 = [
        what
        for name, what in (("fp32_matmul", "matrix products"), ("fp32_convolution", "convolutions"))
        if precisions[name] == "tf32"
    ]
    return f"{cudnn}, {'TF32 in ' + ' and '.join(in_tf32) if in_tf32 else 'no TF32'}"


def describe(device: torch.device) -> dict[str, str | int]:
    """Describe this process's hardware and settings that results depend on."""
    return {
        "device": device.type,
        **_hardware(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **_switches(),
        **_precisions(device),
        "denormals": "kept" if float(torch.tensor(_TINY) * 1) else "flushed",
        **numeric_variables(),
    }


def differences(before: Numerics, now: Numerics) -> list[str]:
    """List what has changed: `gpu: was NVIDIA A100, is NVIDIA H200`. Pure."""
    names = dict.fromkeys((*before, *now))
    return [
        f"{name}: was {before.get(name, 'not set')}, is {now.get(name, 'not set')}"
        for name in names
        if before.get(name) != now.get(name) and before.get(name) != _UNKNOWN
    ]


@final
class NumericsRecord:
    """What a training's bits depend on: goes into its snapshots, and is compared with theirs."""

    def __init__(
        self, device: torch.device, report: Callable[[str], None], *, allow_different: bool
    ) -> None:
        """Create the numerics record.

        Args:
            device: This worker's.
            report: Called with what differs where that is allowed.
            allow_different: Go on with other hardware or libraries than before.
        """
        self._device = device
        self._report = report
        self._allow_different = allow_different
        self._switches = _switch_values()

    def describe(self) -> dict[str, str | int]:
        """Say what the bits depend on now."""
        return describe(self._device)

    def changed(self) -> list[str]:
        """List which switches have been changed in this process since this was made."""
        before, now = self._switches, _switch_values()
        return [] if now == before else differences(_named(before), _named(now))

    def compare(self, saved: object) -> None:
        """Compare with what a snapshot says. Local to the worker.

        Args:
            saved: What `describe` gave when it was taken; None where nobody noted it.

        Raises:
            JobError: They differ, and that isn't allowed.
        """
        if not isinstance(saved, Mapping):
            return
        found = differences(saved, self.describe())
        if not found:
            return
        listed = "\n".join(f"  {line}" for line in found)
        if not self._allow_different:
            raise JobError(
                f"the snapshot was computed with other hardware, libraries or settings:\n{listed}\n"
                "The same bits can't be promised with these. Resume where it was taken, or add "
                "--allow-different-hardware to resume all the same"
            )
        self._report(
            "From here on the bits may differ from those of a training that wasn't moved, since "
            f"this differs:\n{listed}"
        )


def _pin_workspace() -> None:
    given = numeric_variables().get(_WORKSPACE_VARIABLE)
    if given is None:
        set_variables({_WORKSPACE_VARIABLE: _WORKSPACES[0]})
    elif given not in _WORKSPACES:
        raise UsageError(
            f"{_WORKSPACE_VARIABLE}={given} is set, with which cuBLAS doesn't give the same bits "
            "every time. With --shards or --deterministic leave it unset, or give "
            f"{' or '.join(_WORKSPACES)}"
        )


def _pin_compiler() -> None:
    """Make compiled kernels depend on their own shape alone, not on earlier ones."""
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    tuned = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
    enabled = [name for name in (*tuned, "coordinate_descent_tuning") if getattr(inductor, name)]
    if enabled:
        raise UsageError(
            f"TORCHINDUCTOR_{enabled[0].upper()} is on: torch.compile would choose kernels by "
            "their measured speed, so that the bits depend on the clock. With --shards turn it off"
        )
    dynamo.assume_static_by_default = True
    dynamo.automatic_dynamic_shapes = False
    # Beyond the limit a function isn't compiled any more: which ones would depend on the order of
    # shapes. There are few: full and short shards, in training and evaluation.
    dynamo.recompile_limit = _MAX_SHAPES
    dynamo.fail_on_recompile_limit_hit = True
    inductor.deterministic = True


@cache
def _hardware(device: torch.device) -> dict[str, str | int]:
    """Name a worker's hardware and what drives it."""
    if not is_accelerator(device):
        return {"cpu": cpu_name()}
    found: dict[str, str | int] = {"gpu": describe_device(device)}
    if has_cudnn(device):
        found |= {
            "driver": driver_version() or _UNKNOWN,
            "cuda": torch.version.cuda or torch.version.hip or "none",
            "cudnn": torch.backends.cudnn.version() or 0,
        }
    return found


def refuses_nondeterministic() -> bool:
    """Tell whether torch refuses what doesn't give the same bits every time, warnings aside."""
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not only_warns


def _switch_values() -> tuple[int, bool, bool, bool]:
    """Read what a script might change in between."""
    cudnn = torch.backends.cudnn
    return (
        torch.get_num_threads(),
        refuses_nondeterministic(),
        cudnn.deterministic,
        cudnn.benchmark,
    )


def _switches() -> dict[str, str | int]:
    return _named(_switch_values())


def _named(values: tuple[int, bool, bool, bool]) -> dict[str, str | int]:
    threads, *switches = values
    names = ("deterministic_algorithms", "cudnn_deterministic", "cudnn_benchmark")
    return {"threads": threads, **dict(zip(names, map(_yes, switches), strict=True))}


def _precisions(device: torch.device) -> dict[str, str]:
    """Say in what precision fp32 is really multiplied: in TF32 or bf16 where that is allowed."""
    backends, by_cudnn = torch.backends, has_cudnn(device)
    matmul = backends.cuda.matmul if by_cudnn else backends.mkldnn.matmul  # type: ignore[attr-defined]  # properties of a module
    convolution = backends.cudnn.conv if by_cudnn else backends.mkldnn.conv  # type: ignore[attr-defined]  # likewise
    return {
        "fp32_matmul": str(matmul.fp32_precision),
        "fp32_convolution": str(convolution.fp32_precision),
    }


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def numerics_of_all(group: Group, max_batch: int | None) -> list[object]:
    """List what bits depend on, once for each kind of worker. Collective.

    Args:
        max_batch: Most samples that a worker puts through the model at once.

    Returns:
        Mostly a single entry; more where `--allow-different-hardware` lets workers differ.
    """
    own = describe(group.device) | {"max_batch_per_worker": max_batch or "none"}
    texts = group.gather_texts(json.dumps(own, sort_keys=True))
    return [json.loads(text) for text in dict.fromkeys(texts)]


def is_mixed(history: Sequence[Mapping[str, object]], step: int) -> bool:
    """Tell whether steps that count were computed with different numerics. Pure.

    A start whose steps were all lost, because a later one began no further on, doesn't count.

    Args:
        history: The starts, as `run.json` has them.
    """
    kinds, end = set(), step
    for start in reversed(history):
        begin = start.get("from_step")
        if not isinstance(begin, int) or begin >= end:
            continue
        end = begin
        numerics = start.get("numerics")
        for kind in numerics if isinstance(numerics, list) else []:
            kinds.add(json.dumps(kind, sort_keys=True))
    return len(kinds) > 1


def has_mixed(run: RunDirectory, step: int) -> bool:
    """Read from `run.json` whether a training is mixed; see `is_mixed`."""
    history = run.read_run().get("history")
    return is_mixed(history, step) if isinstance(history, list) else False
