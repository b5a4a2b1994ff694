"""JPEG photographs to 256x256 by each decoder, and to training batches by each way of reading them.

    python -m benchmarks.decode [--quick] [--json FILE]

Pillow alone decodes and scales; the others' images are scaled by torch. All but torchvision's
decoder leave out what scaling down would throw away. Then training batches of 32, cut out at random
to 224x224, flipped and normalised, from 500x375 files. All on one core, in turns; the photographs
are made here: noise of many scales, quality 90.
"""

import io
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from unittest import mock

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image, decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from benchmarks.figures import Report, median_figure, parser
from paceline.data.augment import Augment, RandomFlip
from paceline.data.batch import BatchSource
from paceline.data.crop import RandomResizedCrop, center_crop, resize, shorter_side_to
from paceline.data.decode import decoded_to
from paceline.data.imagefolder import load_image_folder
from paceline.data.loading.loader import LoaderSource
from paceline.data.memory import MemorySource, PreparedSource
from paceline.data.options import PackOptions
from paceline.data.order import EpochPlan
from paceline.data.packed import load_packed, pack_images
from paceline.distributed.allocator import keep_freed_memory

WANTED = 256
_SEEN, _BATCH = 224, 32
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
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


def sources(root: Path, augment: Sequence[Augment] = ()) -> Mapping[str, Callable[[int], int]]:
    """Give ways to read an epoch of a folder; each takes its number and gives how many samples.

    Args:
        root: Has `images` from `write_folder`.
        augment: What is done to training batches.
    """
    if not (root / "packed").exists():
        pack_images(root / "images", root / "packed", PackOptions(size=WANTED, jobs=1))
    images = load_image_folder(root / "images", WANTED, jobs=1)["train"]
    raw = LoaderSource(images, loader_workers=0)
    packed = load_packed(root / "packed")["train"]
    return {
        "Paceline, the folder": partial(_epoch, PreparedSource(raw, images, augment=augment)),
        "Paceline, packed": partial(_epoch, MemorySource(packed, augment=augment)),
    }


def _epoch(source: BatchSource, epoch: int) -> int:
    plan = EpochPlan(seed=0, epoch=epoch, global_batch=_BATCH)
    return sum(batch.local for batch in source.train_batches(plan))


def write_folder(root: Path, num: int) -> Path:
    """Write an image folder of 500x375; gives it."""
    for number in range(num):
        folder = root / "images" / "train" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(photograph(*SHAPES[0], seed=number % 8))
    return root / "images"


def others(folder: Path) -> Mapping[str, Callable[[int], int]]:
    """Give the ways that others read training batches of a folder, each in its own idiom."""
    usual = transforms.Compose(
        [
            transforms.RandomResizedCrop(_SEEN),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(_MEAN, _STD),
        ]
    )
    on_tensors = v2.Compose(
        [
            v2.RandomResizedCrop(_SEEN, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(_MEAN, _STD),
        ]
    )
    train = str(folder / "train")
    return {
        "torchvision, Pillow": partial(_loader_epoch, ImageFolder(train, usual)),
        "torchvision, v2 on tensors": partial(
            _loader_epoch, ImageFolder(train, on_tensors, loader=decode_image)
        ),
        "as FFCV does": Shrunk(folder).epoch,
    }


def _loader_epoch(data: ImageFolder, _epoch: int) -> int:
    return sum(len(labels) for _, labels in DataLoader(data, _BATCH, shuffle=True))


class Shrunk:
    """FFCV's way by hand: JPEGs of 256 pixels in one block, decoded, cut out, batched as uint8.

    FFCV itself builds against OpenCV and libjpeg-turbo, and isn't installable from a wheel.
    """

    def __init__(self, folder: Path) -> None:
        self._contents = []
        for path in sorted(folder.rglob("*.jpg")):
            image = Image.open(path)
            scale = WANTED / min(image.size)
            buffer = io.BytesIO()
            size = round(image.width * scale), round(image.height * scale)
            image.resize(size, Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=90)
            self._contents.append(buffer.getvalue())

    def epoch(self, _epoch: int) -> int:
        """Read all; gives how many."""
        order = torch.randperm(len(self._contents)).tolist()
        mean = torch.tensor(_MEAN).view(3, 1, 1) * 255
        scale = 1 / (torch.tensor(_STD).view(3, 1, 1) * 255)
        for begin in range(0, len(order), _BATCH):
            chosen = order[begin : begin + _BATCH]
            batch = torch.stack([self._cut(self._contents[place]) for place in chosen])
            (batch.float() - mean).mul_(scale)
        return len(order)

    def _cut(self, content: bytes) -> Tensor:
        image = torch.from_numpy(simplejpeg.decode_jpeg(content)).permute(2, 0, 1)
        top, left, height, width = transforms.RandomResizedCrop.get_params(
            image, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3]
        )
        cut: Tensor = functional.resized_crop(
            image, top, left, height, width, [_SEEN, _SEEN], antialias=False
        )
        return cut.flip(-1) if torch.rand(()) < 0.5 else cut


def read(ways: Mapping[str, Callable[[int], int]], rounds: int) -> Mapping[str, list[float]]:
    """Time whole epochs in turns; images per second of CPU time in each."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in range(rounds):
        for name, way in ways.items():
            since = process_time()
            samples = way(epoch)
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
        folder = write_folder(Path(root), 128)
        augment = (RandomResizedCrop(_SEEN), RandomFlip())
        for what, ways in (
            ("256x256", sources(Path(root))),
            ("cut out to 224x224", {**others(folder), **sources(Path(root), augment)}),
        ):
            read(ways, 1)
            for name, rates in read(ways, 3 if arguments.quick else 15).items():
                title = f"batches {what}: {name}"
                report.figures.append(median_figure(title, rates, "images/s"))
                report.raw[title] = rates
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
