"""What a recipe's data looks like to the model: tiles of training samples and of the test set."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.loading.dataset_worker import ItemRequest, SeededItems
from paceline.data.memory import MemorySource, TensorData
from paceline.data.order import EpochPlan, epoch_order
from paceline.data.protocols import MapDataset
from paceline.errors import DataError
from paceline.report.image_grid import Tile
from paceline.training.job import ImageSet, Job

_EVALUATION = -1  # the epoch that validation items are seeded with


def training_tiles(job: Job, seed: int, count: int) -> list[Tile]:
    """Show the first samples of the first epoch as training sees them, augmented.

    Args:
        seed: The training's: it gives the order and the random changes.

    Raises:
        DataError: There are no samples, they can't be read, or they aren't images with labels.
    """
    data = job.train
    count = _checked(data, count)
    if isinstance(data, TensorData):
        source = MemorySource(_unnormalised(data), augment=job.augment)
        plan = EpochPlan(seed=seed, epoch=0, global_batch=count)
        batch = next(iter(source.train_batches(plan)))
        return _tiles_of(data, batch.inputs, batch.targets)
    order = epoch_order(len(data), seed, 0)[:count]
    return _read(data, ItemRequest(seed, 0, 0, tuple(order.tolist())))


def evaluation_tiles(job: Job, count: int) -> list[Tile]:
    """Show samples spread evenly over the validation set, in its order, as evaluation sees them.

    Raises:
        DataError: As `training_tiles`.
    """
    data = job.validation
    count = _checked(data, count)
    total = data.num_samples if isinstance(data, TensorData) else len(data)
    indices = [number * total // count for number in range(count)]
    if isinstance(data, TensorData):
        few = replace(data, images=data.images[indices], labels=data.labels[indices])
        source = MemorySource(_unnormalised(few), evaluate_with=job.evaluate_with)
        batch = next(iter(source.eval_batches(0, 1, count)))
        return _tiles_of(data, batch.inputs, batch.targets)
    return _read(data, ItemRequest(0, _EVALUATION, 0, tuple(indices)))


def to_pixels(image: object) -> NDArray[np.uint8]:
    """Turn an image as a data set gives it into RGB bytes, (height, width, 3).

    A tensor is (height, width) or (channels, height, width): uint8, or floats from 0 to 1. Floats
    beyond that (normalised ones) are stretched from the image's least to its largest value.

    Raises:
        DataError: It isn't an image.
    """
    from PIL import Image

    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"))
    tensor = torch.from_numpy(image) if isinstance(image, np.ndarray) else image
    if not isinstance(tensor, Tensor) or tensor.ndim not in (2, 3) or not tensor.numel():
        shape = f" of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else ""
        raise DataError(
            f"a sample is a {type(image).__name__}{shape}, which can't be shown as an image: "
            "expected a PIL image or a tensor (channels, height, width)"
        )
    # (H, W) or (C, H, W) to (3, H, W): of fewer than three channels the first is repeated.
    planes = tensor.detach().cpu()
    planes = planes[None] if planes.ndim == 2 else planes
    planes = planes[:3] if len(planes) >= 3 else planes[:1].expand(3, -1, -1)
    return _to_bytes(planes).permute(1, 2, 0).contiguous().numpy()


def _to_bytes(planes: Tensor) -> Tensor:
    if planes.dtype == torch.uint8:
        return planes
    values = planes.to(torch.float32)
    low, high = values.min(), values.max()
    if low < 0 or high > 1:
        values = (values - low) / (high - low).clamp_min(1e-12)
    return (values * 255).round().to(torch.uint8)


def _unnormalised(data: TensorData) -> TensorData:
    channels = data.images.shape[1]
    return replace(data, mean=(0.0,) * channels, std=(1.0,) * channels)


def _tiles_of(data: TensorData, images: Tensor, labels: Tensor) -> list[Tile]:
    images = images.clamp(0, 1)  # a change of the user's own may leave the scale
    return [
        Tile(pixels=to_pixels(image), label=data.class_names[label])
        for image, label in zip(images, labels.tolist(), strict=True)
    ]


def _checked(data: ImageSet, count: int) -> int:
    total = data.num_samples if isinstance(data, TensorData) else len(data)
    if not total:
        raise DataError("the data set holds no samples: there is nothing to show")
    return min(count, total)


def _read(data: MapDataset, request: ItemRequest) -> list[Tile]:
    items = SeededItems(data, lambda listed: listed).__getitems__(request)
    assert isinstance(items, list)
    names = getattr(data, "class_names", None) or getattr(data, "classes", None) or ()
    return [_tile(item, names) for item in items]


def _tile(item: object, names: Sequence[str]) -> Tile:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(
            f"a sample is a {type(item).__name__}; a preview needs pairs (image, label)"
        )
    image, label = item
    if isinstance(label, Tensor) and label.numel() == 1:
        label = label.item()
    known = isinstance(label, int | np.integer) and 0 <= label < len(names)
    return Tile(pixels=to_pixels(image), label=str(names[int(label)] if known else label))
