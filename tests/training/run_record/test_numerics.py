"""What bits depend on: pinned, recorded, and compared on resuming."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.distributed.group import Group
from paceline.errors import JobError, UsageError
from paceline.training.options import ComputeOptions
from paceline.training.run_record.numerics import (
    NumericsRecord,
    choose_kernels,
    describe,
    describe_kernels,
    differences,
    pin,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


def pinned(look: Callable[[], object], threads: int | None = None, **variables: str) -> object:
    """Pin in a process of its own, which ends with all that was changed."""

    def body(group: Group) -> object:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        os.environ.update(variables)
        pin(threads)
        return look()

    return run_ranks(1, body)[0]


def test_what_is_pinned() -> None:
    found = pinned(lambda: describe(CPU))
    assert isinstance(found, dict)
    expected = {
        "device": "cpu",
        "threads": 1,
        "deterministic_algorithms": "yes",
        "cudnn_deterministic": "yes",
        "cudnn_benchmark": "no",
        "denormals": "kept",
        "torch": torch.__version__,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    assert found.items() >= expected.items()
    assert found["cpu"]
    assert found["cpu_capability"] == torch.backends.cpu.get_cpu_capability()


def chosen(*, pinned: bool = False, **options: Any) -> str:
    choose_kernels(ComputeOptions(**options), pinned=pinned)
    cudnn = torch.backends.cudnn
    return (
        f"benchmark {cudnn.benchmark}, deterministic {cudnn.deterministic}, all "
        f"{torch.are_deterministic_algorithms_enabled()}; {describe_kernels(torch.device('cuda'))}"
    )


KERNELS: list[tuple[str, dict[str, Any], str]] = [
    ("usual", {}, "False, deterministic False, all False; cuDNN's choice, TF32 in convolutions"),
    ("tried out", {"cudnn_benchmark": True}, "True, deterministic False, all False; cuDNN's fast"),
    ("as it was", {}, "True, deterministic False, all False; cuDNN's fastest"),
    ("not tried out", {"cudnn_benchmark": False}, "False, deterministic False, all False; cuDNN's"),
    ("the same bits", {"deterministic": True}, "False, deterministic True, all True; the same"),
    ("shards", {"pinned": True}, "False, deterministic True, all True; the same bits"),
    ("TF32", {"tf32": "on"}, "choice, TF32 in matrix products and convolutions"),
    ("TF32 where it was", {"tf32": "convolutions"}, "choice, TF32 in convolutions"),
    ("no TF32", {"tf32": "off"}, "choice, no TF32"),
]


def test_which_kernels_are_chosen() -> None:
    def body(group: Group) -> list[str]:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        found = []
        for _, options, _ in KERNELS:
            torch.use_deterministic_algorithms(False)
            if options.get("pinned"):
                pin(None)
            found.append(chosen(**options))
        return found

    for found, (what, _, expected) in zip(run_ranks(1, body)[0], KERNELS, strict=True):
        assert expected in found, what


def test_tf32_can_be_read_by_its_old_and_its_new_name() -> None:
    def body(group: Group) -> list[object]:
        choose_kernels(ComputeOptions(tf32="on"), pinned=False)
        cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
        new = [cuda.matmul.fp32_precision, cudnn.conv.fp32_precision]  # type: ignore[attr-defined]  # properties of a module
        return [
            *new,
            cuda.matmul.allow_tf32,
            cudnn.allow_tf32,
            torch.get_float32_matmul_precision(),
        ]

    assert run_ranks(1, body)[0] == ["tf32", "tf32", True, True, "high"]


def test_threads_that_are_asked_for() -> None:
    assert pinned(torch.get_num_threads, 3) == 3


def test_memory_is_not_filled_for_nothing() -> None:
    filled = pinned(lambda: torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]
    assert filled is False


def test_a_workspace_that_is_deterministic_too_is_kept() -> None:
    found = pinned(lambda: describe(CPU), CUBLAS_WORKSPACE_CONFIG=":16:8")
    assert isinstance(found, dict)
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_workspace_that_is_not_is_refused() -> None:
    def refused(group: Group) -> str:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
        with pytest.raises(UsageError) as error:
            pin(None)
        return str(error.value)

    assert "CUBLAS_WORKSPACE_CONFIG=:0:0" in run_ranks(1, refused)[0]


@pytest.mark.parametrize("name", ["max_autotune", "coordinate_descent_tuning"])
def test_kernels_chosen_by_the_clock_are_refused(name: str) -> None:
    def refused(group: Group) -> str:
        from torch._inductor import config

        setattr(config, name, True)
        with pytest.raises(UsageError) as error:
            pin(None)
        return str(error.value)

    assert f"TORCHINDUCTOR_{name.upper()} is on" in run_ranks(1, refused)[0]


@pytest.mark.slow
def test_a_compiled_function_has_one_kernel_for_each_shape() -> None:
    def compiled_shapes() -> list[object]:
        shapes: list[object] = []

        def backend(module: nn.Module, inputs: list[object]) -> object:
            sizes = [x.shape[0] for x in inputs if isinstance(x, torch.Tensor)]
            shapes.append(sizes[0] if all(type(n) is int for n in sizes) else "any")
            return module.forward

        double = torch.compile(lambda x: 2 * x, backend=backend)
        for rows in (*range(2, 14), 3, 5):  # more than the usual limit of 8
            double(torch.ones(rows))
        return shapes

    assert pinned(compiled_shapes) == list(range(2, 14))


def test_variables_of_libraries_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX2,STRICT")
    assert describe(CPU)["MKL_CBWR"] == "AVX2,STRICT"


def test_flushed_denormals_are_seen() -> None:
    def body(group: Group) -> object:
        torch.set_flush_denormal(True)
        flushed = describe(CPU)["denormals"]
        pin(None)
        return flushed, describe(CPU)["denormals"]

    assert run_ranks(1, body) == [("flushed", "kept")]


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"gpu": "A"}, {"gpu": "A"}, []),
        ({"gpu": "A", "x": 1}, {"gpu": "B", "x": 1}, ["gpu: was A, is B"]),
        ({"threads": 1}, {"threads": 2}, ["threads: was 1, is 2"]),
        ({"MKL_CBWR": "AVX2"}, {}, ["MKL_CBWR: was AVX2, is not set"]),
        ({}, {"cpu": "C"}, ["cpu: was not set, is C"]),
    ],
)
def test_each_difference_is_told(
    before: dict[str, str | int], now: dict[str, str | int], found: list[str]
) -> None:
    assert differences(before, now) == found


def record(*, allow: bool) -> tuple[NumericsRecord, list[str]]:
    said: list[str] = []
    return NumericsRecord(CPU, said.append, allow_different=allow), said


@pytest.mark.parametrize("allow", [False, True])
def test_going_on_with_the_same_says_nothing(allow: bool) -> None:
    own, said = record(allow=allow)
    own.compare(own.describe())
    own.compare(None)  # no hook has noted it
    assert said == []


def test_going_on_with_something_else_is_refused() -> None:
    own, _ = record(allow=False)
    with pytest.raises(JobError) as error:
        own.compare(own.describe() | {"cpu": "another", "threads": 77})
    text = str(error.value)
    assert "cpu: was another, is " in text
    assert "threads: was 77, is " in text
    assert "--allow-different-hardware" in text


def test_or_said_where_it_is_allowed() -> None:
    own, said = record(allow=True)
    own.compare(own.describe() | {"cpu": "another"})
    assert len(said) == 1
    assert "cpu: was another" in said[0]


def test_a_switch_that_the_script_changes_is_seen() -> None:
    def body(group: Group) -> list[list[str]]:
        own = NumericsRecord(CPU, print, allow_different=False)
        before = own.changed()
        torch.set_num_threads(2)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        return [before, own.changed()]

    before, after = run_ranks(1, body)[0]
    assert before == []
    assert [line.partition(":")[0] for line in after] == ["threads", "cudnn_benchmark"]


def test_a_driver_that_nobody_could_name_before_is_no_difference() -> None:
    before, now = {"gpu": "MI300X", "driver": "unknown"}, {"gpu": "MI300X", "driver": "6.10.5"}
    assert differences(before, now) == []
    assert differences(now, before) == ["driver: was 6.10.5, is unknown"]


def test_rocms_variables_are_recorded_but_not_where_its_files_are() -> None:
    found = pinned(
        lambda: describe(CPU),
        MIOPEN_DEBUG_CONV_FFT="0",
        ROCBLAS_USE_HIPBLASLT="1",
        MIOPEN_USER_DB_PATH="/tmp/rank0",
    )
    assert isinstance(found, dict)
    assert (found["MIOPEN_DEBUG_CONV_FFT"], found["ROCBLAS_USE_HIPBLASLT"]) == ("0", "1")
    assert "MIOPEN_USER_DB_PATH" not in found
