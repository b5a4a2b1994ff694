"""What the opening lines say of a batch."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from paceline.data.options import DataOptions
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.training.batches.plan import make_plan
from paceline.training.engine import Engine
from paceline.training.options import ComputeOptions, LoopOptions
from paceline.training.run_record import run_metadata
from paceline.training.run_record.run_metadata import (
    _compile_line,
    _kernels_line,
    _peak_gpu_memory,
    _position,
    _target_line,
    describe_batch,
)


@pytest.mark.parametrize(
    ("options", "world_size", "samples", "told"),
    [
        (DataOptions(), 2, 640, "= 2 x 32 per worker; 10 steps an epoch"),
        (DataOptions(), 3, 640, "= 22 + 21 + 21; 10 steps an epoch"),
        (DataOptions(), 1, None, ""),
        (
            DataOptions(max_batch_per_worker=20),
            2,
            64,
            "= 2 x 32 per worker, in 2 micro-batches; 1 step an epoch",
        ),
        (
            DataOptions(shards=8),
            3,
            640,
            "in 8 shards of 8, the same bits on 1 to 8 workers; 10 steps an epoch",
        ),
        (
            DataOptions(shards=5),
            1,
            None,
            "in 5 shards of 12 or 13, the same bits on 1 to 5 workers",
        ),
        (DataOptions(shards=1), 1, None, "in 1 shard of 64"),
        (
            DataOptions(shards=2, max_batch_per_worker=16),
            2,
            None,
            "in 2 shards of 32, each in 2 micro-batches, the same bits on 1 to 2 workers",
        ),
    ],
    ids=str,
)
def test_how_a_batch_is_cut(
    options: DataOptions, world_size: int, samples: int | None, told: str
) -> None:
    plan = make_plan(options, Division.of(options.shards, world_size), samples)
    assert describe_batch(plan) == f"global batch 64 {told}".rstrip()


def test_a_large_batch_is_written_as_other_numbers_are() -> None:
    plan = make_plan(DataOptions(global_batch=4096), Division.of(None, 3), None)
    assert describe_batch(plan) == "global batch 4,096 = 1,366 + 1,365 + 1,365"
    plan = make_plan(DataOptions(global_batch=4096), Division.of(None, 2), None)
    assert describe_batch(plan) == "global batch 4,096 = 2 x 2,048 per worker"


@pytest.mark.parametrize(
    ("device", "options", "shards", "chosen", "told"),
    [
        ("cpu", {}, None, {"fused": True}, None),
        (
            "cuda",
            {},
            None,
            {"fused": True, "foreach": False},
            ", fused optimizer; faster: --precision bf16",
        ),
        # A script's own optimizer, which could be fused; and one that has no such kernel.
        (
            "cuda",
            {},
            None,
            {"fused": None, "foreach": None},
            "; faster: --precision bf16, fused=True in the optimizer",
        ),
        ("cuda", {"precision": "bf16"}, None, {"foreach": None}, ""),
        ("cuda", {"precision": "bf16", "compile": True}, None, {"fused": False}, ""),
        # Other bits aren't proposed where bits count.
        ("cuda", {}, 8, {"fused": None, "foreach": None}, ""),
    ],
)
def test_the_kernels_of_a_gpu_and_what_would_be_faster(
    device: str,
    options: dict[str, Any],
    shards: int | None,
    chosen: dict[str, object],
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_metadata, "has_bf16", lambda device: True)
    context = SimpleNamespace(
        group=SimpleNamespace(device=torch.device(device), world_size=1),
        config=SimpleNamespace(compute=ComputeOptions(**options)),
        division=Division.of(shards, 1),
        components=SimpleNamespace(optimizers=[SimpleNamespace(param_groups=[chosen])]),
    )
    lines = _kernels_line(cast(Engine, SimpleNamespace(context=context)))
    if told is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith("  kernels   cuDNN")
        assert line.endswith(f"convolutions{told}")


@pytest.mark.parametrize(
    ("device", "compiled", "told"),
    [
        ("cuda", False, []),
        ("cuda", True, ["  compile   on, cut where buckets of gradients end"]),
        ("cpu", True, ["  compile   on"]),
    ],
)
def test_whether_models_are_compiled(device: str, compiled: bool, told: list[str]) -> None:
    context = SimpleNamespace(
        group=SimpleNamespace(device=torch.device(device), world_size=2),
        config=SimpleNamespace(compute=ComputeOptions(compile=compiled)),
        division=Division.of(None, 2),
        compile_switch=None,
    )
    assert _compile_line(cast(Engine, SimpleNamespace(context=context))) == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (LoopOptions(), []),
        (LoopOptions(target_accuracy=0.9), ["  target    ends at 90 % validation accuracy"]),
        (
            LoopOptions(target_accuracy=0.975, patience=2),
            ["  target    ends at 97.5 % validation accuracy in 2 epochs in a row"],
        ),
    ],
)
def test_the_target_is_said_at_the_start(options: LoopOptions, told: list[str]) -> None:
    assert _target_line(options) == told


@pytest.mark.parametrize(
    ("epoch", "told"),
    [(1, "step 23: epoch 2, 3 of 10 steps done"), (2, "step 23: all 2 epochs done")],
)
def test_where_a_training_goes_on_is_said(epoch: int, told: str) -> None:
    state = SimpleNamespace(step=23, epoch=epoch, step_in_epoch=3)
    context = SimpleNamespace(
        progress=SimpleNamespace(state=state, steps_per_epoch=10),
        config=SimpleNamespace(loop=LoopOptions(epochs=2)),
    )
    assert _position(cast(Engine, SimpleNamespace(context=context))) == told


def test_the_memory_of_each_workers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 3 << 30)
    other = torch.tensor([[5 << 30]])

    def group(device: str) -> Group:
        both = SimpleNamespace(
            device=torch.device(device), gather_rows=lambda own: torch.cat([own[None], other])
        )
        return cast(Group, both)

    assert _peak_gpu_memory(group("cuda")) == [3 << 30, 5 << 30]
    assert _peak_gpu_memory(group("cpu")) is None
