"""Classifies errors of GPUs and of NCCL by their text: whose fault they are, and what helps.

torch raises a plain RuntimeError or a subclass for all of them, and a process that aborts only
prints them: nothing but the text distinguishes them.
"""

import re
from dataclasses import dataclass
from typing import Literal

_CALL = r"(?:(?:CUDA|HIP)(?: driver)? error: |(?:CUDA|HIP) failure:? ?(?:\d+ )?')"
"""What torch, NCCL and RCCL put before the text of `cudaGetErrorString` or `hipGetErrorString`."""
_BROKEN = (
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "integrity checks failed",
    "CUDA-capable device(s) is/are busy or unavailable",
    "system not yet initialized",
    "MPS client failed to connect",
    "the remote procedural call between the MPS server",
    "MPS server is not ready",
    "the MPS client has been terminated",
    "unknown error",
)
"""https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html lists all of them."""
_WRONG = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "hardware stack error",
)


@dataclass(frozen=True)
class DeviceError:
    """What is known of an error by its text."""

    kind: Literal["job", "infrastructure"]
    name: str
    """What has failed, in a few words."""
    advice: str
    """What to do, in a sentence or two."""


def _after_call(*texts: str) -> str:
    return _CALL + "(?:" + "|".join(map(re.escape, texts)) + ")"


_LATER = (
    "A GPU reports errors late, so that the traceback may show a later line: run it again with "
    "CUDA_LAUNCH_BLOCKING=1 to see the right one"
)
_KNOWN: tuple[tuple[re.Pattern[str], DeviceError], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), error)
    for pattern, error in (
        (
            r"(?:CUDA|HIP|XPU|MPS backend) out of memory|_STATUS_ALLOC_FAILED|"
            + _after_call("out of memory"),
            DeviceError(
                "job",
                "the GPU's memory is full",
                "The GPU's memory is full. --max-batch-per-worker N puts at most N samples through "
                "the model at once and changes nothing else (but for BatchNorm, which sees N at a "
                "time); --precision bf16, more workers or a smaller --global-batch help as well. "
                "nvidia-smi shows what else uses this GPU",
            ),
        ),
        (
            _after_call("device-side assert triggered"),
            DeviceError(
                "job",
                "a check in a GPU kernel failed",
                "A check in a GPU kernel failed: nearly always an index out of range, such as a "
                "label (target) below 0 or not below the number of the model's outputs, or a token "
                "not below the size of the embedding. The worker's log has the kernel's own line. "
                f"--device cpu names the index. {_LATER}",
            ),
        ),
        (
            _after_call(*_WRONG),
            DeviceError(
                "job",
                "a GPU kernel did something illegal",
                "A GPU kernel did something illegal: a custom kernel or an extension reads or "
                "writes out of bounds, or memory was freed while it was in use; compute-sanitizer "
                f"finds where. {_LATER}",
            ),
        ),
        (
            r"ncclInvalid(?:Usage|Argument)\b",
            DeviceError(
                "job",
                "NCCL was used wrongly",
                "NCCL refuses the call, and would again: two workers on one GPU (its last words "
                "are `Duplicate GPU detected`) want fewer --workers, or --device cuda "
                "--backend gloo; else see the lines above with NCCL_DEBUG=WARN set",
            ),
        ),
        (
            _after_call("unspecified launch failure"),
            DeviceError(
                "infrastructure",
                "a GPU kernel was broken off",
                "A GPU kernel was broken off: by a fault of the GPU (then dmesg has a line with "
                "Xid), or by a custom kernel that accesses memory out of bounds. If it comes back "
                "at the same step on another GPU, look there with compute-sanitizer",
            ),
        ),
        (
            r"GPU is lost|fallen off the bus|\bXid\b|_DEVICE_LOST\b|" + _after_call(*_BROKEN),
            DeviceError(
                "infrastructure",
                "the GPU failed",
                "The GPU, its driver or its link failed, not the training. If it comes back on "
                "this host, look at dmesg (lines with Xid) and nvidia-smi -q, and reset the GPU or "
                "take the host out",
            ),
        ),
        (
            r"Cannot re-initialize \w+ in forked subprocess|"
            r"data set failed at sample .*: CUDA error: initialization error",
            DeviceError(
                "job",
                "a forked process uses the GPU",
                "A process that was forked from another can't use that one's GPU. A data set's "
                "samples are made in such processes and belong on the host: leave .to(device) out "
                "of it, since its loader moves batches to the device. --loader-workers 0 makes "
                "samples in the training's own process",
            ),
        ),
        (
            r"\b(?:on|at|in|have) (?:the )?same device\b|"
            r"Input type \(torch\.\w+\) and weight type \(torch\.cuda\.|"
            r"Input type \(torch\.cuda\.\w+\) and weight type \(torch\.(?!cuda)",
            DeviceError(
                "job",
                "tensors are on different devices",
                "A session moves models to its worker's device, and its loaders' batches. What the "
                "script moves or makes itself belongs there too: device = s.device in place of a "
                'name such as "cpu". Or train where the script puts it, with --device cpu or '
                'paceline.session(device="cpu")',
            ),
        ),
    )
)
"""In this order: what a text of several errors says first of all."""


def device_error(text: str) -> DeviceError | None:
    """Recognise an error of a GPU by its text; None for anything else. Pure."""
    return next((error for pattern, error in _KNOWN if pattern.search(text)), None)
