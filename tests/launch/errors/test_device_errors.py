import ctypes
import importlib.util
import signal
from pathlib import Path

import pytest

from paceline.errors import DataError
from paceline.launch.errors.device_errors import device_error
from paceline.launch.errors.error_records import describe, kind_of
from paceline.launch.errors.failures import WorkerFailure, root_cause, silent_failure
from paceline.launch.local.logs import open_log, read_crash
from paceline.results.run_directory import log_path

# The texts of torch 2.15; `{}` stands for what cudaGetErrorString says.
_TORCH = (
    "CUDA error: {}\nSearch for `cudaError...' in https://docs.nvidia.com/cuda/ for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so "
    "the stacktrace below might be incorrect.\nFor debugging consider passing "
    "CUDA_LAUNCH_BLOCKING=1\n"
)
_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.29.7\nncclUnhandledCudaError: Call to "
    "CUDA function failed.\nLast error:\nCuda failure 7 '{}'"
)
_FULL = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 11.25 GiB is free. Including non-PyTorch memory, this process has 67.85 GiB memory in "
    "use. Of the allocated memory 66.10 GiB is allocated by PyTorch, and 1.02 GiB is reserved by "
    "PyTorch but unallocated."
)
_CUDA = {
    2: ("out of memory", "job"),
    46: ("CUDA-capable device(s) is/are busy or unavailable", "infrastructure"),
    214: ("uncorrectable ECC error encountered", "infrastructure"),
    220: ("uncorrectable NVLink error detected during the execution", "infrastructure"),
    700: ("an illegal memory access was encountered", "job"),
    710: ("device-side assert triggered", "job"),
    716: ("misaligned address", "job"),
    719: ("unspecified launch failure", "infrastructure"),
    802: ("system not yet initialized", "infrastructure"),
    999: ("unknown error", "infrastructure"),
}


_APART = (
    "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other "
    "tensors on cuda:0 (when checking argument in method wrapper_CUDA_addmm)",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or "
    "input should be a MKLDNN tensor and weight is a dense tensor",
    "Input and parameter tensors are not at the same device, found input tensor at cpu and "
    "parameter tensor at cuda:0",
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
)
"""What a script gets that mixes devices."""

_OF_DATA = "the data set failed at sample 3: RuntimeError: {}"
_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must "
    "use the 'spawn' start method",
    _TORCH.format("initialization error"),
)


class AcceleratorError(RuntimeError):
    """Named as torch's, which isn't imported here."""


class DistBackendError(RuntimeError):
    """Likewise."""


@pytest.mark.parametrize(("text", "kind"), _CUDA.values())
def test_whose_fault_an_error_of_the_device_is(text: str, kind: str) -> None:
    assert kind_of(AcceleratorError(_TORCH.format(text))) == kind
    assert kind_of(RuntimeError(_TORCH.format(text).replace("CUDA error", "HIP error"))) == kind
    assert kind_of(DistBackendError(_NCCL.format(text))) == kind
    assert kind_of(ValueError(_TORCH.format(text))) == "job"


def test_these_are_the_texts_of_cuda() -> None:
    found = importlib.util.find_spec("nvidia")
    places = [] if found is None else list(found.submodule_search_locations or ())
    libraries = [file for place in places for file in Path(place).glob("*/lib/libcudart.so.*")]
    if not libraries:
        pytest.skip("no CUDA runtime is installed")
    text_of = ctypes.CDLL(str(libraries[0])).cudaGetErrorString
    text_of.restype = ctypes.c_char_p
    assert {code: text_of(code).decode() for code in _CUDA} == {
        code: text for code, (text, _) in _CUDA.items()
    }


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (RuntimeError(_FULL), "job", "--max-batch-per-worker"),
        (RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB"), "job", "--precision bf16"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"),
            "job",
            "nvidia-smi",
        ),
        (RuntimeError(_TORCH.format(_CUDA[710][0])), "job", "label (target)"),
        (RuntimeError(_TORCH.format(_CUDA[700][0])), "job", "CUDA_LAUNCH_BLOCKING=1"),
        (RuntimeError(_TORCH.format(_CUDA[214][0])), "infrastructure", "dmesg"),
        (RuntimeError("NVML: GPU is lost. Reboot the system"), "infrastructure", "dmesg"),
        (DistBackendError("ncclInvalidUsage: .. Duplicate GPU detected"), "job", "--workers"),
        *((RuntimeError(text), "job", "s.device") for text in _APART),
        *((DataError(_OF_DATA.format(text)), "job", "leave .to(device) out") for text in _FORKED),
    ],
)
def test_what_helps_stands_under_the_traceback(error: Exception, kind: str, advice: str) -> None:
    failure = describe(error, 1)
    assert (failure.kind, failure.message) == (kind, str(error))
    last = failure.traceback.splitlines()[-1]
    assert advice in last
    assert describe(error, 1).traceback.count(last) == 1


def test_others_are_no_errors_of_a_device() -> None:
    for text in (
        "unknown error",
        "the file is out of memory order",
        "ncclRemoteError: A call failed possibly due to a network error",
        "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) differ",
        "Input type (float) and bias type (c10::Half) should be the same",
    ):
        assert device_error(text) is None
    remote = "NCCL error in: x, remote process exited or there was a network error\nncclRemoteError"
    assert kind_of(DistBackendError(remote)) == "infrastructure"


_ABORTED = """working
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated with exception: {}
Fatal Python error: Aborted

Thread 0x00007f (most recent call first):
"""


@pytest.mark.parametrize("code", [214, 710])
def test_an_abort_says_why(code: int, tmp_path: Path) -> None:
    text, kind = _CUDA[code]
    with open_log(tmp_path, 2, 4, 0) as log:
        log.write(_ABORTED.format(_TORCH.format(text)))
    failure = silent_failure(
        2,
        -signal.SIGABRT,
        host="h",
        step=7,
        operation="step",
        out_of_memory=False,
        crash=read_crash(log_path(tmp_path, 2)),
    )
    assert (failure.kind, failure.signal_name) == (kind, "SIGABRT")
    assert text in failure.traceback
    assert "working" not in failure.traceback
    found = device_error(f"CUDA error: {text}")
    assert found is not None
    assert found.name in failure.message
    assert found.advice in failure.traceback


def test_a_broken_gpu_is_the_cause_and_its_peers_lost_connections_follow() -> None:
    def of(rank: int, error: RuntimeError) -> WorkerFailure:
        return describe(error, rank)

    lost = of(0, DistBackendError("NCCL error in: x, remote process exited\nncclRemoteError"))
    broken = of(1, DistBackendError(_NCCL.format(_CUDA[214][0])))
    assert [failure.rank for failure in root_cause([lost, broken])] == [1, 0]
