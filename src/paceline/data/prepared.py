"""Raw images that loader processes read, augmented and normalised on the device.

The same batches as `MemorySource` makes of the same images: augmentation by the same numbers, the
same arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.data.augment import Augment
from paceline.data.batch import Batch, to_channels_last
from paceline.data.memory import channel_factors, no_draws
from paceline.data.order import EpochPlan, plan_order, plan_shares
from paceline.data.random import uniforms
from paceline.data.source import BatchSource


@runtime_checkable
class RawImages(Protocol):
    """How a data set's raw images are normalised; its items are (uint8 (C, H, W), label)."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, on the scale 0 … 1."""

    @property
    def std(self) -> tuple[float, ...]:
        """Per channel, on the scale 0 … 1."""

    @property
    def scale(self) -> float:
        """The raw value that stands for 1."""


class PreparedSource(BatchSource):
    """Wraps a source of raw images, (uint8 (N, C, H, W), labels), already on the device."""

    def __init__(
        self,
        raw: BatchSource,
        images: RawImages,
        device: torch.device | str = "cpu",
        *,
        memory_format: torch.memory_format = torch.contiguous_format,
        dtype: torch.dtype = torch.float32,
        augment: Sequence[Augment] = (),
        evaluate_with: Sequence[Augment] = (),
    ) -> None:
        """Args:
        raw: Gives the raw images on `device`.
        images: How they are normalised.
        device: Where the batches are.
        memory_format: `torch.channels_last` or `torch.contiguous_format`, of the inputs.
        dtype: Of the inputs.
        augment: Applied in this order to training batches, before normalisation.
        evaluate_with: Likewise to evaluation batches; changes that aren't random.
        """
        self._raw = raw
        self._device = torch.device(device)
        self._channels_last = memory_format == torch.channels_last
        self._augment = tuple(augment)
        self._evaluate_with = tuple(evaluate_with)
        factor, offset = channel_factors(images.mean, images.std, images.scale)
        self._factor = factor.to(self._device, dtype)
        self._offset = offset.to(self._device, dtype)

    @property
    def num_samples(self) -> int:
        """Size of the data set."""
        return self._raw.num_samples

    def train_batches(self, plan: EpochPlan) -> Iterator[Batch]:
        """Give the batches of one epoch, augmented."""
        order = torch.from_numpy(plan_order(plan, self.num_samples))
        shares = plan_shares(plan, self.num_samples)
        for found, batch in zip(shares, self._raw.train_batches(plan), strict=True):
            images, labels = batch.pair()
            first = found.start if found.start < found.stop else found.batch_start
            indices = order[first : first + len(images)].to(self._device, non_blocking=True)
            for stream, augment in enumerate(self._augment):
                draws = uniforms(plan.seed, plan.epoch, indices, stream, augment.num_draws)
                images = augment(images, draws)
            yield replace(batch, content=(self._normalised(images), labels))

    def eval_batches(self, part: int, parts: int, batch_size: int) -> Iterator[Batch]:
        """Give one part's contiguous share in order, not augmented."""
        for batch in self._raw.eval_batches(part, parts, batch_size):
            images, labels = batch.pair()
            for change in self._evaluate_with:
                images = change(images, no_draws(images))
            yield replace(batch, content=(self._normalised(images), labels))

    def describe(self) -> str:
        """Say what is read, and what is done to it."""
        return self._raw.describe() + "".join(f", {augment}" for augment in self._augment)

    def close(self) -> None:
        """Close the source of the raw images."""
        self._raw.close()

    def _normalised(self, raw: Tensor) -> Tensor:
        inputs = torch.mul(raw, self._factor).add_(self._offset)
        return to_channels_last(inputs) if self._channels_last else inputs.contiguous()
