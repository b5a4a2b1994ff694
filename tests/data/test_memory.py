from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.data.augment import Augment, RandomFlip, RandomShift, Resize
from paceline.data.batch import Batch
from paceline.data.memory import MemorySource, TensorData, synthetic_images
from paceline.data.order import EpochPlan, epoch_order
from paceline.errors import DataError

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def plan(part: int = 0, parts: int = 1, first_step: int = 0, batch: int = 16) -> EpochPlan:
    return EpochPlan(
        seed=5, epoch=2, global_batch=batch, first_step=first_step, part=part, parts=parts
    )


def by_hand(data: TensorData, picked: Tensor) -> Tensor:
    mean = torch.tensor(data.mean)[:, None, None]
    std = torch.tensor(data.std)[:, None, None]
    return (data.images[picked].float() / data.scale - mean) / std


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_equal_a_loop_by_hand(channels: int, layout: torch.memory_format) -> None:
    data = synthetic_images(70, channels, 6, 4, 10, seed=1)
    order = torch.from_numpy(epoch_order(70, 5, 2))
    batches = list(MemorySource(data, memory_format=layout).train_batches(plan()))
    assert [batch.local for batch in batches] == [16, 16, 16, 16, 6]
    for batch, picked in zip(batches, order.split(16), strict=True):
        torch.testing.assert_close(batch.inputs, by_hand(data, picked), rtol=1e-6, atol=1e-6)
        assert torch.equal(batch.targets, data.labels[picked])
        assert batch.indices.tolist() == picked.tolist()
        assert batch.total == batch.local


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augmented", [False, True])
def test_channels_last_inputs_are_real(channels: int, augmented: bool) -> None:
    data = synthetic_images(20, channels, 6, 4, 10, seed=1)
    augment: list[Augment] = [RandomShift(1), RandomFlip()] if augmented else []
    source = MemorySource(data, memory_format=torch.channels_last, augment=augment)
    for batch in [*source.train_batches(plan()), *source.eval_batches(0, 1, 16)]:
        assert batch.inputs.stride() == (24 * channels, 1, 4 * channels, channels)


AUGMENTS: dict[str, list[Augment]] = {
    "bytes": [RandomShift(2), RandomFlip()],
    "another size": [Resize((5, 5)), RandomShift(1)],
}


@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_augmented_images_are_normalised(
    augment: list[Augment], layout: torch.memory_format
) -> None:
    """By the source, and by hand from what it gives without."""
    data = synthetic_images(20, 3, 7, 9, 10, seed=1)
    raw = replace(data, mean=(0.0,) * 3, std=(1.0,) * 3, scale=1.0)
    (found,) = MemorySource(data, memory_format=layout, augment=augment).train_batches(
        plan(batch=20)
    )
    (plain,) = MemorySource(raw, augment=augment).train_batches(plan(batch=20))
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    wanted = (plain.inputs / 255 - mean) / std
    torch.testing.assert_close(found.inputs, wanted, rtol=1e-6, atol=1e-5)
    assert found.inputs.is_contiguous(memory_format=layout)
    assert plain.inputs.max() > 100


@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 20])
def test_workers_see_the_same_augmented_samples_as_one(parts: int, augment: list[Augment]) -> None:
    data = synthetic_images(50, 3, 6, 6, 10, seed=1)
    source = MemorySource(data, augment=augment)
    alone = list(source.train_batches(plan()))
    for step, shares in enumerate(
        zip(*(source.train_batches(plan(part, parts)) for part in range(parts)), strict=True)
    ):
        inputs = torch.cat([batch.inputs[: batch.local] for batch in shares])
        assert torch.equal(inputs, alone[step].inputs)
        assert sum(batch.local for batch in shares) == alone[step].local
        assert {batch.total for batch in shares} == {alone[step].local}


def test_an_empty_share_gets_a_stand_in() -> None:
    data = synthetic_images(17, 1, 4, 4, 10, seed=1)
    *_, last = MemorySource(data).train_batches(plan(part=2, parts=3))
    order = epoch_order(17, 5, 2)
    assert (last.local, last.total, len(last.indices)) == (0, 1, 0)
    stand_in = by_hand(data, torch.tensor([order[16]]))
    torch.testing.assert_close(last.inputs, stand_in, rtol=1e-6, atol=1e-6)
    assert last.targets.tolist() == [data.labels[order[16]]]


def test_resuming_in_the_middle_gives_the_rest() -> None:
    source = MemorySource(synthetic_images(50, 1, 4, 4, 10, seed=1), augment=[RandomShift(1)])
    whole = list(source.train_batches(plan()))
    rest = list(source.train_batches(plan(first_step=2)))
    assert len(rest) == len(whole) - 2
    for left, right in zip(rest, whole[2:], strict=True):
        assert torch.equal(left.inputs, right.inputs)


def test_epochs_differ_in_order_and_augmentation() -> None:
    data = synthetic_images(16, 1, 8, 8, 10, seed=1)
    source = MemorySource(data, augment=[RandomShift(2)])
    (first,) = source.train_batches(EpochPlan(seed=0, epoch=0, global_batch=16))
    (second,) = source.train_batches(EpochPlan(seed=0, epoch=1, global_batch=16))
    assert first.indices.tolist() != second.indices.tolist()
    left = first.inputs[first.indices.argsort()]
    right = second.inputs[second.indices.argsort()]
    assert not torch.equal(left, right)


def test_a_sample_is_augmented_alike_wherever_it_stands_in_the_epoch() -> None:
    data = synthetic_images(16, 1, 8, 8, 10, seed=1)
    source = MemorySource(data, augment=[RandomShift(2)])
    (mixed,) = source.train_batches(EpochPlan(seed=0, epoch=1, global_batch=16))
    (plain,) = source.train_batches(EpochPlan(seed=0, epoch=1, global_batch=16, shuffle=False))
    assert plain.indices.tolist() == list(range(16)) != mixed.indices.tolist()
    assert torch.equal(mixed.inputs, plain.inputs[mixed.indices])


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("num", [1, 5, 33])
def test_evaluation_sees_every_sample_once_in_order(num: int, parts: int) -> None:
    data = synthetic_images(num, 1, 4, 4, 10, seed=1)
    source = MemorySource(data, augment=[RandomShift(1)])
    batches: list[Batch] = []
    for part in range(parts):
        batches += source.eval_batches(part, parts, 4)
    assert [i for batch in batches for i in batch.indices.tolist()] == list(range(num))
    assert all(batch.local == batch.total == len(batch.inputs) <= 4 for batch in batches)
    inputs = torch.cat([batch.inputs for batch in batches])
    torch.testing.assert_close(inputs, by_hand(data, torch.arange(num)), rtol=1e-6, atol=1e-6)
    assert torch.equal(torch.cat([batch.targets for batch in batches]), data.labels)


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("layout", "extra"), [(torch.contiguous_format, []), (torch.channels_last, ["permute.default"])]
)
def test_a_batch_costs_no_more_operators_than_by_hand(
    layout: torch.memory_format, extra: list[str]
) -> None:
    """A view of the order, two gathers, a multiplication and an addition, as in a tuned loop."""
    data = synthetic_images(64, 1, 4, 4, 10, seed=1)
    batches = MemorySource(data, memory_format=layout).train_batches(plan())
    next(batches)
    with Recorded() as recorded:
        next(batches)
    counted = ["slice.Tensor", "index_select.default", "mul.Tensor", "add_.Tensor"]
    assert recorded.names == [*counted, *extra, "index_select.default"]


def test_the_data_is_not_copied_where_it_fits() -> None:
    data = synthetic_images(10, 1, 4, 4, 10, seed=1)
    for layout in LAYOUTS:
        (batch,) = MemorySource(data, memory_format=layout).eval_batches(0, 1, 10)
        assert batch.targets.data_ptr() == data.labels.data_ptr()


def test_describe_and_close() -> None:
    source = MemorySource(synthetic_images(1234, 3, 4, 5, 7, seed=1), augment=[RandomShift(2)])
    assert source.describe() == (
        "synthetic: 1,234 images 3x4x5 in 7 classes, in memory on cpu, shift by up to 2 px"
    )
    source.close()
    source.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(4, 1, 2, 2)}, "images should be uint8"),
        ({"images": torch.zeros(4, 2, 2, dtype=torch.uint8)}, "images should be uint8"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "one for each of 4 images"),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, "labels should be int64"),
        ({"labels": torch.tensor([0, 1, 2, 3])}, "labels should be 0 … 2"),
        ({"labels": torch.tensor([0, 1, 2, -1])}, "labels should be 0 … 2"),
        ({"mean": (0.1, 0.2)}, "one value for each channel"),
    ],
)
def test_data_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    fitting: dict[str, Any] = {
        "name": "mine",
        "images": torch.zeros(4, 1, 2, 2, dtype=torch.uint8),
        "labels": torch.tensor([0, 1, 2, 0]),
        "class_names": ("a", "b", "c"),
        "mean": (0.5,),
        "std": (0.5,),
    }
    with pytest.raises(DataError, match=f"mine: .*{message}"):
        TensorData(**fitting | change)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "within"), [("bytes", 1e-6), ("another size", 2e-2)])
def test_a_gpu_makes_the_same_batches(
    layout: torch.memory_format, name: str, within: float
) -> None:
    data = synthetic_images(50, 3, 6, 6, 10, seed=1)
    augment = AUGMENTS[name]
    host, device = (
        MemorySource(data, where, memory_format=layout, augment=augment)
        for where in ("cpu", "cuda")
    )
    for left, right in zip(host.train_batches(plan()), device.train_batches(plan()), strict=True):
        assert right.inputs.device.type == right.targets.device.type == "cuda"
        assert right.inputs.stride() == left.inputs.stride()
        torch.testing.assert_close(right.inputs.cpu(), left.inputs, rtol=1e-6, atol=within)
        assert torch.equal(right.targets.cpu(), left.targets)


def test_equal_arguments_give_equal_data() -> None:
    left, right = (synthetic_images(20, 3, 4, 5, 7, seed=9) for _ in range(2))
    other = synthetic_images(20, 3, 4, 5, 7, seed=10)
    assert left.images.shape == (20, 3, 4, 5)
    assert left.num_classes == 7
    assert torch.equal(left.images, right.images)
    assert torch.equal(left.labels, right.labels)
    assert not torch.equal(left.images, other.images)


def test_the_training_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    synthetic_images(20, 3, 4, 5, 7, seed=9)
    assert torch.equal(before, torch.get_rng_state())


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        synthetic_images(20, 3, 0, 5, 7, seed=9)
