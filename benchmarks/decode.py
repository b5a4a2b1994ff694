"""JPEG photographs to 256x256 by each decoder on one core, in interleaved blocks.

    python -m benchmarks.decode [--quick] [--json FILE]

Pillow alone decodes and scales; the others' images are scaled by torch. All but torchvision's
decoder leave out what scaling down would throw away. The photographs are made here: noise of many
scales, quality 90.
"""

import io
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import process_time
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.io import decode_jpeg

from benchmarks.figures import Report, median_figure, parser
from paceline.data.batch import BatchSource
from paceline.data.crop import center_crop, resize, shorter_side_to
from paceline.data.decode import decoded_to
from paceline.data.imagefolder import load_image_folder
from paceline.data.loader import LoaderSource
from paceline.data.memory import MemorySource, PreparedSource
from paceline.data.options import PackOptions
from paceline.data.order import EpochPlan
from paceline.data.packed import load_packed, pack_images
from paceline.distributed.allocator import keep_freed_memory

WANTED = 256
SHAPES = ((375, 500), (600, 800), (1200, 1600))
_SCALES = (4, 8, 16, 32, 64, 128)
_PHOTOGRAPHS = 6

Decoder = Callable[[bytes], Tensor]


def photograph(height: int, width: int, seed: int) -> bytes:
    """Make a JPEG about as large as a photograph's."""
    generator = np.random.default_rng(seed)
    image = generator.normal(size=(height, width, 3)).astype(np.float32)
    for scale in _SCALES:
        small = generator.normal(size=(3, height // scale + 2, width // scale + 2))
        for channel, values in enumerate(small.astype(np.float32) * scale**0.8):
            smooth = Image.fromarray(values).resize((width, height), Image.Resampling.BICUBIC)
            image[..., channel] += np.asarray(smooth)
    lowest, highest = image.min(), image.max()
    pixels = ((image - lowest) / (highest - lowest) * 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def by_pillow_alone(content: bytes) -> Tensor:
    image = Image.open(io.BytesIO(content))
    image.draft("RGB", (WANTED, WANTED))
    height, width = shorter_side_to(image.height, image.width, WANTED)
    scaled = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    return center_crop(torch.from_numpy(np.array(scaled)).permute(2, 0, 1), WANTED)


def by_pillow(content: bytes) -> Tensor:
    with mock.patch("paceline.data.decode.simplejpeg", None):
        return decoded_to(content, WANTED)


def by_simplejpeg(content: bytes) -> Tensor:
    return decoded_to(content, WANTED)


def by_torchvision(content: bytes) -> Tensor:
    decoded = decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    height, width = decoded.shape[1:]
    return center_crop(resize(decoded[None], shorter_side_to(height, width, WANTED))[0], WANTED)


DECODERS: Mapping[str, Decoder] = {
    "Pillow alone": by_pillow_alone,
    "Pillow": by_pillow,
    "simplejpeg": by_simplejpeg,
    "torchvision": by_torchvision,
}


def play(contents: Sequence[bytes], rounds: int) -> Mapping[str, list[float]]:
    """Time the decoders in turns; images per second of CPU time in each round."""
    rates: dict[str, list[float]] = {name: [] for name in DECODERS}
    for _ in range(rounds):
        for name, decoder in DECODERS.items():
            since = process_time()
            for content in contents:
                decoder(content)
            rates[name].append(len(contents) / (process_time() - since))
    return rates


def sources(root: Path, num: int) -> Mapping[str, BatchSource]:
    """Write an image folder of 500x375, pack it, and serve it from the folder and packed."""
    for number in range(num):
        folder = root / "images" / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(photograph(*SHAPES[0], seed=number % 8))
    pack_images(root / "images", root / "packed", PackOptions(size=WANTED, jobs=1))
    images = load_image_folder(root / "images", WANTED, jobs=1)["train"]
    return {
        "batches from the folder": PreparedSource(LoaderSource(images, loader_workers=0), images),
        "batches from the packed folder": MemorySource(load_packed(root / "packed")["train"]),
    }


def read(both: Mapping[str, BatchSource], rounds: int) -> Mapping[str, list[float]]:
    """Time whole epochs in turns; images per second of CPU time in each."""
    rates: dict[str, list[float]] = {name: [] for name in both}
    for epoch in range(rounds):
        for name, source in both.items():
            since = process_time()
            plan = EpochPlan(seed=0, epoch=epoch, global_batch=32)
            samples = sum(batch.local for batch in source.train_batches(plan))
            rates[name].append(samples / (process_time() - since))
    return rates


def main() -> int:
    """Measure and report."""
    arguments = parser(__doc__ or "").parse_args()
    warnings.filterwarnings("ignore", ".*decoding and encoding capabilities of TorchVision")
    torch.set_num_threads(1)
    keep_freed_memory()
    report = Report(name="decode")
    report.remarks = [f"to {WANTED}x{WANTED}; images per second of CPU time, one core"]
    for height, width in SHAPES:
        contents = [photograph(height, width, seed) for seed in range(_PHOTOGRAPHS)]
        play(contents, 1)
        size = sum(map(len, contents)) / len(contents) / 1024
        for name, rates in play(contents, 3 if arguments.quick else 15).items():
            title = f"{width}x{height} ({size:.0f} KB), {name}"
            report.figures.append(median_figure(title, rates, "images/s"))
            report.raw[title] = rates
    with tempfile.TemporaryDirectory() as root:
        both = sources(Path(root), 128)
        read(both, 1)
        for name, rates in read(both, 3 if arguments.quick else 15).items():
            report.figures.append(median_figure(f"{name}, 32 of 500x375", rates, "images/s"))
            report.raw[name] = rates
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
