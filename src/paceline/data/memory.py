"""Images kept in memory as uint8: batches are normalised and augmented on the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.data.augment import Augment, uniforms
from paceline.data.batch import Batch, BatchSource
from paceline.data.order import EpochPlan, plan_order, plan_shares
from paceline.data.splitmix import Domain, derive_key
from paceline.distributed.device_copies import to_device
from paceline.distributed.work_division import share
from paceline.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorData:
    """Images and labels in memory, and how to normalise them."""

    name: str
    images: Tensor
    """Raw values, uint8 (N, C, H, W)."""
    labels: Tensor
    """Class numbers, int64 (N,)."""
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """Per channel, on the scale 0 … 1."""
    std: tuple[float, ...]
    """Per channel, on the scale 0 … 1."""
    scale: float = 255.0
    """The raw value that stands for 1."""

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise DataError(
                f"{self.name}: images should be uint8 (samples, channels, height, width), "
                f"not {self.images.dtype} {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"{self.name}: labels should be int64, one for each of {len(self.images)} images, "
                f"not {self.labels.dtype} {tuple(self.labels.shape)}"
            )
        if not len(self.mean) == len(self.std) == self.images.shape[1]:
            raise DataError(f"{self.name}: mean and std need one value for each channel")
        if self.num_samples and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(
            self.class_names
        ):
            raise DataError(f"{self.name}: labels should be 0 … {len(self.class_names) - 1}")

    @property
    def num_samples(self) -> int:
        """Number of images."""
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


class MemorySource(BatchSource):
    """Batches of a `TensorData` that lives on the device.

    A batch without augmentation is one index_select each for images and labels, one multiplication
    (which also turns uint8 into floats) and one addition: no host sync, no copy from the host.
    """

    def __init__(
        self,
        data: TensorData,
        device: torch.device | str = "cpu",
        *,
        memory_format: torch.memory_format = torch.contiguous_format,
        augment: Sequence[Augment] = (),
        evaluate_with: Sequence[Augment] = (),
    ) -> None:
        """Move the data to the device.

        Args:
            device: Where the data is kept and batches are made.
            memory_format: `torch.channels_last` or `torch.contiguous_format`, of the inputs.
            augment: Applied in this order to training batches, before normalisation.
            evaluate_with: Likewise to evaluation batches; changes that aren't random.
        """
        self._title = _describe(data)
        self._device = torch.device(device)
        self._channels_last = memory_format == torch.channels_last
        self._augment = tuple(augment)
        self._evaluate_with = tuple(evaluate_with)
        # (N, H, W, C) or (N, C, H, W)
        self._images = _laid_out(data.images, self._channels_last).to(self._device)
        self._labels = data.labels.to(self._device)
        factor, offset = _normalisation(data, self._channels_last)
        self._factor = factor.to(self._device, torch.float32)
        self._offset = offset.to(self._device, torch.float32)
        self._by_channel = tuple(
            t.to(self._device, torch.float32) for t in _normalisation(data, False)
        )

    @property
    def num_samples(self) -> int:
        """Number of images."""
        return len(self._images)

    def train_batches(self, plan: EpochPlan) -> Iterator[Batch]:
        """Give the batches of one epoch; the order is moved to the device once."""
        # What every worker knows: the order of the epoch, and each sample's random numbers by its
        # index.
        order = plan_order(plan, self.num_samples)  # (num_samples,)
        on_device = to_device(torch.from_numpy(order), self._device)
        draws = [
            uniforms(plan.seed, plan.epoch, on_device, stream, augment.num_draws)
            for stream, augment in enumerate(self._augment)
        ]
        # This worker's share of each step.
        for step_share in plan_shares(plan, self.num_samples):
            start, stop = step_share.to_read
            picked = on_device[start:stop]
            raw = self._images.index_select(0, picked)
            if draws:
                # Augmentation normalises as well, once pixels have moved.
                inputs = self._augmented(raw, [table[start:stop] for table in draws])
            else:
                inputs = self._normalised(raw)
            del raw  # nothing but the batch lives through a step
            yield Batch(
                (inputs, self._labels.index_select(0, picked)),
                step_share.stop - step_share.start,
                step_share.total,
                order[step_share.start : step_share.stop],
                step_share.last,
                step_share.part,
            )

    def read_ahead(self, plan: EpochPlan) -> None:
        """Do nothing: all of it is in memory."""

    def eval_batches(self, part: int, parts: int, batch_size: int) -> Iterator[Batch]:
        """Give one part's contiguous share; labels are views of the data, not to be changed."""
        begin, end = share(self.num_samples, part, parts)
        for start in range(begin, end, batch_size):
            stop = min(start + batch_size, end)
            raw = self._images[start:stop]
            inputs = self._evaluation_inputs(raw) if self._evaluate_with else self._normalised(raw)
            indices = np.arange(start, stop, dtype=np.int64)
            labels = self._labels[start:stop]
            yield Batch((inputs, labels), stop - start, stop - start, indices)

    def describe(self) -> str:
        """Say what is kept where."""
        extra = "".join(f", {augment}" for augment in self._augment)
        return f"{self._title}, in memory on {self._device}{extra}"

    def close(self) -> None:
        """Nothing to end: there are no reader processes."""

    def _normalised(self, raw: Tensor) -> Tensor:
        inputs = torch.mul(raw, self._factor).add_(self._offset)
        return inputs.permute(0, 3, 1, 2) if self._channels_last else inputs

    def _augmented(self, raw: Tensor, draws: Sequence[Tensor]) -> Tensor:
        """Augment and normalise; sizes may change on the way, and uint8 become floats."""
        images = raw.permute(0, 3, 1, 2) if self._channels_last else raw
        for augment, table in zip(self._augment, draws, strict=True):
            images = augment(images, table)
        return self._normalised_by_channel(images)

    def _evaluation_inputs(self, raw: Tensor) -> Tensor:
        images = raw.permute(0, 3, 1, 2) if self._channels_last else raw
        for change in self._evaluate_with:
            images = change(images, torch.empty(len(images), 0, device=images.device))
        return self._normalised_by_channel(images)

    def _normalised_by_channel(self, images: Tensor) -> Tensor:
        factor, offset = self._by_channel
        inputs = torch.mul(images, factor).add_(offset)
        if self._channels_last:
            return inputs.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return inputs


def _describe(data: TensorData) -> str:
    _, channels, height, width = data.images.shape
    return (
        f"{data.name}: {data.num_samples:,} images {channels}x{height}x{width} "
        f"in {data.num_classes} classes"
    )


def _laid_out(images: Tensor, channels_last: bool) -> Tensor:
    """Store images in the layout of the inputs; without a copy where the bytes fit already."""
    if not channels_last:
        return images.contiguous()
    if images.shape[1] == 1:
        return images.contiguous()[:, 0, :, :, None]
    return images.permute(0, 2, 3, 1).contiguous()


def _normalisation(data: TensorData, channels_last: bool) -> tuple[Tensor, Tensor]:
    """Fold (raw / scale - mean) / std into raw * factor + offset, shaped to fit one stored image.

    With channels last the tensors are as large as an image: broadcasting over three innermost
    channels would make the inner loop three elements long.
    """
    means, stds = (
        torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (data.mean, data.std)
    )
    factor, offset = 1 / (stds * data.scale), -means / stds  # (C, 1, 1)
    _, channels, height, width = data.images.shape
    if channels_last and channels > 1:
        full = (height, width, channels)
        factor, offset = (t.flatten().expand(full).contiguous() for t in (factor, offset))
    return factor, offset


def synthetic_images(
    samples: int, channels: int, height: int, width: int, classes: int, seed: int
) -> TensorData:
    """Make random images and labels; there is nothing in them to learn.

    Args:
        seed: Another seed gives other data.

    Raises:
        ValueError: A size isn't positive.
    """
    if min(samples, channels, height, width, classes) < 1:
        raise ValueError("samples, channels, height, width and classes must be at least 1")
    generator = torch.Generator().manual_seed(derive_key(Domain.SYNTHETIC, seed) >> 1)
    shape = (samples, channels, height, width)
    return TensorData(
        name="synthetic",
        images=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, classes, (samples,), generator=generator),
        class_names=tuple(str(label) for label in range(classes)),
        mean=(0.5,) * channels,
        std=(0.29,) * channels,
    )
