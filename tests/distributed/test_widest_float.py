"""Where a device has no float64, nothing is computed in it."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.data.augment import Augment, RandomFlip, RandomShift, Resize, uniforms
from paceline.distributed import device
from paceline.distributed.work_division import Division
from paceline.gradient_sync import batchnorm
from paceline.training.context import TrainingContext
from paceline.training.evaluation.distributed_mean import _summed
from paceline.training.loss_weights import LossWeights
from paceline.training.sync.base import GradientSync

META = torch.device("meta")
"""Stands for a device: shapes and types without values."""


class _NoFloat64(TorchDispatchMode):
    """Is what such a device is: it refuses float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.is_meta and made.dtype is torch.float64:
                raise TypeError(f"{func} makes float64")
        return result


@pytest.fixture(autouse=True)
def _without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device._KINDS, "meta", device._KINDS["mps"])


@pytest.mark.parametrize(
    "augment",
    [
        RandomShift(2),
        RandomFlip(),
        Resize((6, 6)),
    ],
    ids=str,
)
def test_augmentation(augment: Augment) -> None:
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8, device=META)
    with _NoFloat64():
        draws = uniforms(1, 0, torch.zeros(4, dtype=torch.int64, device=META), 0, augment.num_draws)
        assert augment(images, draws).is_meta


def test_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Alone:
        apply = staticmethod(Tensor.clone)

    monkeypatch.setattr(batchnorm, "_SumOverWorkers", Alone)
    with _NoFloat64():
        losses = torch.zeros(4, device=META)
        for value in (losses, losses.mean(), 1.0):
            assert _summed("loss", value, 4, META).dtype is torch.float32
        assert batchnorm._statistics(torch.zeros(4, 3, 2, 2, device=META))[0].is_meta


def test_a_device_that_has_it_takes_it() -> None:
    assert device.widest_float(torch.device("cpu")) is torch.float64
    assert device.widest_float(torch.device("cuda", 1)) is torch.float64
    assert device.widest_float(torch.device("mps")) is torch.float32


def test_losses_are_weighed_in_what_the_device_has() -> None:
    group = SimpleNamespace(rank=0, world_size=1, device=META, sum_=lambda sums: sums)
    context = SimpleNamespace(
        group=group,
        division=Division.of(None, 1),
        step=SimpleNamespace(loss_before=None, gathered=None),
        place=(0, True),
        optimizer_step=SimpleNamespace(counts_batches=False),
    )
    parameter = torch.nn.Parameter(torch.zeros(3, device=META))
    parameter.grad = torch.zeros(3, device=META)
    context.components = SimpleNamespace(optimizers=[torch.optim.SGD([parameter])])
    sync = SimpleNamespace(backward=lambda loss, batch: None)
    weights = LossWeights(cast("TrainingContext", context), cast("GradientSync", sync))
    with _NoFloat64():
        loss = torch.zeros((), device=META)
        assert weights.backward(loss, None, 3.0, more=False).is_meta
