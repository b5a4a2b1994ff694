"""Decodes image files to one size, for folders that are read and folders that are packed alike.

Large JPEGs are scaled down by 2, 4 or 8 while they are decoded. Where simplejpeg is installed it
decodes them, faster and to the same bits as Pillow, which also decides what is broken.
"""

import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from paceline.data.crop import center_crop, resize, shorter_side_to

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

_MAX_SCALED = 8
"""A JPEG is coded in squares of 8 x 8 pixels: one pixel each is the least."""


class BrokenImageError(ValueError):
    """A file that should be an image isn't one, or is damaged; the message says why."""


def decoded_to(content: bytes, size: int) -> Tensor:
    """Decode an image, scale its shorter side to `size` and cut out the middle.

    As torchvision's Resize and CenterCrop, bilinear with antialiasing; colours become RGB, 16 bits
    of grey become 8, an orientation that the camera noted is not applied.

    Args:
        size: Height and width wanted, in pixels.

    Returns:
        uint8 (3, size, size).

    Raises:
        BrokenImageError: The content is damaged or no image.
    """
    decoded = decode(content, size)
    height, width = decoded.shape[1:]
    scaled = resize(decoded[None], shorter_side_to(height, width, size))
    return center_crop(scaled, size)[0].contiguous()


def decode(content: bytes, size: int) -> Tensor:
    """Decode an image file's content; a large JPEG may come smaller, but not below `size`.

    Returns:
        uint8 (3, H, W).

    Raises:
        BrokenImageError: The content is damaged or no image.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            fast = None
            if simplejpeg is not None and image.format == "JPEG" and image.mode in ("RGB", "L"):
                fast = _decode_fast(content, *image.size, size)
            pixels = _decode_with_pillow(image, size) if fast is None else fast
            return torch.from_numpy(pixels).permute(2, 0, 1)
    except UnidentifiedImageError as error:
        raise BrokenImageError("it is no image of a known format") from error
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise BrokenImageError(str(error) or type(error).__name__) from error


def _decode_fast(content: bytes, width: int, height: int, size: int) -> NDArray[np.uint8] | None:
    """Decode a JPEG to (H, W, 3); None where it is left to Pillow."""
    factor = 1
    while 2 * factor <= min(_MAX_SCALED, min(width, height) // size):
        factor *= 2
    least = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            content, "RGB", min_factor=1, **least if factor > 1 else {}
        )
    except ValueError:
        return None
    return pixels


def _decode_with_pillow(image: Image.Image, size: int) -> NDArray[np.uint8]:
    image.draft("RGB", (size, size))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    # Pillow would cut what is above 255 off; a 16-bit PGM comes in 32 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise BrokenImageError("32 bits a pixel say nothing about black and white: save it with 8")
    return np.array(image.convert("RGB"))
