"""Changes the size of whole batches of images, as torchvision's Resize does image by image."""

import torch
import torch.nn.functional as F
from torch import Tensor


def resize(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Resize a batch by bilinear interpolation, antialiased where it shrinks.

    Within 1 of what Pillow (torchvision's Resize) gives for each image. On a CPU uint8 is worked on
    as it is; other devices go through float32 and round.

    Args:
        images: uint8 (N, C, H, W), on any device.
        size: Height and width; one number for both.

    Returns:
        uint8 (N, C, height, width) on the same device; the input itself where nothing changes.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if images.shape[2:] == (height, width):
        return images
    if images.device.type == "cpu":
        return _interpolated(images, height, width)
    exact = _interpolated(images.to(torch.float32), height, width)
    return exact.round_().clamp_(0, 255).to(torch.uint8)


def shorter_side_to(height: int, width: int, size: int) -> tuple[int, int]:
    """Scale height and width so that the shorter one is `size`; the other rounds down."""
    if height <= width:
        return size, max(size, size * width // height)
    return max(size, size * height // width), size


def center_crop(images: Tensor, size: int) -> Tensor:
    """Cut the middle out; (..., H, W) with H, W >= size to (..., size, size), a view.

    An odd rest is halved as torchvision's CenterCrop halves it.
    """
    height, width = images.shape[-2:]
    top, left = round((height - size) / 2), round((width - size) / 2)
    return images[..., top : top + size, left : left + size]


def _interpolated(images: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(
        images, size=(height, width), mode="bilinear", align_corners=False, antialias=True
    )
