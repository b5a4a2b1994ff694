import io

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import v2

from paceline.data.decode import BrokenImageError, decode, decoded_to


def smooth(height: int, width: int) -> Image.Image:
    small = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def stored(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def by_torchvision(content: bytes, size: int) -> NDArray[np.int64]:
    image = Image.open(io.BytesIO(content)).convert("RGB")
    cut = v2.CenterCrop(size)(v2.Resize(size)(image))
    return np.asarray(cut).transpose(2, 0, 1).astype(np.int64)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize(("height", "width"), [(48, 64), (61, 40), (32, 32), (20, 30)])
def test_equals_torchvision(kind: str, height: int, width: int) -> None:
    content = stored(smooth(height, width), kind)
    found = decoded_to(content, 32)
    assert found.shape == (3, 32, 32)
    assert found.is_contiguous()
    assert np.abs(found.numpy() - by_torchvision(content, 32)).max() <= 2


def test_a_large_jpeg_is_scaled_while_it_is_decoded() -> None:
    content = stored(smooth(400, 500), "JPEG")
    assert decode(content, 48).shape == (3, 50, 63)
    assert decode(content, 250).shape == (3, 400, 500)
    assert np.abs(decoded_to(content, 48).numpy() - by_torchvision(content, 48)).mean() < 4


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_other_jpegs_become_rgb(mode: str) -> None:
    content = stored(smooth(40, 40).convert(mode), "JPEG")
    assert np.abs(decoded_to(content, 32).numpy() - by_torchvision(content, 32)).max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_scaled(kind: str) -> None:
    grey = np.asarray(smooth(40, 40).convert("L"))
    content = stored(Image.fromarray(grey.astype(np.uint16) * 257), kind)
    np.testing.assert_array_equal(decode(content, 40).numpy(), np.stack([grey] * 3))


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_32_bits_are_refused(kind: type) -> None:
    content = stored(Image.fromarray(np.ones((40, 40), kind)), "TIFF")
    with pytest.raises(BrokenImageError, match="32 bits a pixel"):
        decode(content, 40)


@pytest.mark.parametrize("mode", ["P", "L", "LA", "RGBA", "1"])
def test_other_pngs_become_rgb(mode: str) -> None:
    options = {"transparency": bytes(range(256))} if mode == "P" else {}
    content = stored(smooth(40, 40).convert(mode), "PNG", **options)
    image = Image.open(io.BytesIO(content))
    wanted = np.asarray(image.convert("RGBA").convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(decode(content, 40).numpy(), wanted)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("size", [8, 40])
def test_truncated_images_are_broken(kind: str, size: int) -> None:
    content = stored(smooth(60, 60), kind)
    decode(content, size)
    for share in (0.3, 0.6, 0.9):
        with pytest.raises(BrokenImageError):
            decode(content[: int(len(content) * share)], size)


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xd8", b"<html>no image</html>", b"\x89PNG\r\n\x1a\n"]
)
def test_other_content_is_broken(content: bytes) -> None:
    with pytest.raises(BrokenImageError, match="no image of a known format"):
        decode(content, 32)


def result(content: bytes, size: int) -> bytes | str:
    try:
        return decode(content, size).numpy().tobytes()
    except BrokenImageError as error:
        return str(error)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
def test_damage_gives_an_image_or_a_reason(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same one with and without simplejpeg."""
    generator = np.random.default_rng(2)
    content = bytearray(stored(smooth(40, 40), kind))
    reasons = 0
    for _ in range(200):
        damaged = content.copy()
        damaged[generator.integers(len(content))] ^= 1 << int(generator.integers(8))
        found = result(bytes(damaged), 16)
        with monkeypatch.context() as patch:
            patch.setattr("paceline.data.decode.simplejpeg", None)
            assert result(bytes(damaged), 16) == found
        assert found
        reasons += isinstance(found, str)
    assert 0 < reasons < 200


@pytest.mark.parametrize(("height", "width"), [(47, 63), (64, 65), (200, 333), (700, 513)])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_simplejpeg_gives_the_bits_of_pillow(
    height: int, width: int, subsampling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = stored(smooth(height, width), "JPEG", subsampling=subsampling, quality=90)
    pytest.importorskip("simplejpeg")
    fast = decode(content, 31)
    monkeypatch.setattr("paceline.data.decode.simplejpeg", None)
    slow = decode(content, 31)
    assert torch.equal(fast, slow)
    assert torch.equal(fast, decode(content, 31))
