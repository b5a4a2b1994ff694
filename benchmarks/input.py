"""Batched augmentation against torchvision's by sample, on one core, in interleaved blocks.

    python -m benchmarks.input [--quick] [--json FILE]

The CIFAR-10 list of the DDP course: flip, rotation, affine, colour jitter, normalisation.
Theirs goes image by image through PIL, in a Dataset behind a DataLoader with `num_workers=0`; ours
is a `MemorySource`. Blocks alternate (order ABBA) in one process of one thread.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter, process_time
from typing import Literal, final

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from benchmarks.figures import Report, median_figure, parser, ratios
from paceline.data.affine import RandomAffine, Warp
from paceline.data.augment import Augment, RandomFlip
from paceline.data.jitter import ColorJitter
from paceline.data.memory import MemorySource, TensorData
from paceline.data.order import EpochPlan
from paceline.distributed.allocator import keep_freed_memory

BATCH, SIDE, CHANNELS = 256, 32, 3
AT_LEAST = 8.0
_DROPPED = 2
Mode = Literal["nearest", "bilinear"]


@dataclass(kw_only=True)
class Blocks:
    """Seconds per image of each block: of the clock, and of the process's CPU time."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)
    theirs_cpu: list[float] = field(default_factory=list)


@final
class BySample(Dataset[tuple[Tensor, int]]):
    """Images as torchvision's CIFAR10 keeps them: an array, made a PIL image and transformed."""

    def __init__(self, data: TensorData, mode: Mode) -> None:
        self._arrays = data.images.permute(0, 2, 3, 1).contiguous().numpy()
        self._labels = data.labels.tolist()
        how = InterpolationMode(mode)
        self._transform = transforms.Compose(
            [
                transforms.RandomHorizontalFlip(),
                transforms.RandomRotation(10, interpolation=how),
                transforms.RandomAffine(0, shear=10, scale=(0.8, 1.2), interpolation=how),
                transforms.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
                transforms.ToTensor(),
                transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
            ]
        )

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self._arrays[index])
        return self._transform(image), self._labels[index]


def random_images(num: int) -> TensorData:
    """Make noise of CIFAR-10's shape: what is computed doesn't depend on what is seen."""
    generator = torch.Generator().manual_seed(0)
    shape = (num, CHANNELS, SIDE, SIDE)
    return TensorData(
        name="random",
        images=torch.randint(256, shape, dtype=torch.uint8, generator=generator),
        labels=torch.randint(10, (num,), generator=generator),
        class_names=tuple("0123456789"),
        mean=(0.5,) * CHANNELS,
        std=(0.5,) * CHANNELS,
    )


def augmentation(mode: Mode) -> tuple[Augment, ...]:
    """Give the same by batches."""
    affine = RandomAffine(shear=10, scale=(0.8, 1.2))
    warp = Warp(RandomFlip(), RandomAffine(10), affine, interpolation=mode)
    return (warp, ColorJitter(0.2, 0.2, 0.2))


def our_batches(data: TensorData, mode: Mode, layout: torch.memory_format) -> Iterator[Tensor]:
    """Give Paceline's batches without end, epoch after epoch."""
    source = MemorySource(data, memory_format=layout, augment=augmentation(mode))
    epoch = 0
    while True:
        for batch in source.train_batches(EpochPlan(seed=0, epoch=epoch, global_batch=BATCH)):
            yield batch.inputs
        epoch += 1


def their_batches(data: TensorData, mode: Mode) -> Iterator[Tensor]:
    """Give torchvision's batches without end."""
    loader = DataLoader(BySample(data, mode), batch_size=BATCH, shuffle=True)
    while True:
        for inputs, _ in loader:
            yield inputs


def play(ours: Iterator[Tensor], theirs: Iterator[Tensor], pairs: int, batches: int) -> Blocks:
    """Time both in turns; ours makes five times as many batches in a block."""
    blocks = Blocks()
    sides: list[tuple[Iterator[Tensor], int, list[float], list[float]]] = [
        (ours, 5 * batches, blocks.ours, blocks.ours_cpu),
        (theirs, batches, blocks.theirs, blocks.theirs_cpu),
    ]
    for pair in range(pairs):
        for source, count, clock, cpu in sides if pair % 2 else reversed(sides):
            since, since_cpu = perf_counter(), process_time()
            for _ in range(count):
                next(source)
            clock.append((perf_counter() - since) / (count * BATCH))
            cpu.append((process_time() - since_cpu) / (count * BATCH))
    return blocks


def add_match(report: Report, title: str, blocks: Blocks, at_least: float | None) -> None:
    """Put one comparison's figures into the report."""
    ours, theirs, ours_cpu, theirs_cpu = (
        side[_DROPPED:] for side in (blocks.ours, blocks.theirs, blocks.ours_cpu, blocks.theirs_cpu)
    )
    same = ratios(theirs[0::2], theirs[1::2])
    report.figures += [
        median_figure(
            f"{title}: Paceline / torchvision", ratios(theirs, ours), "x", at_least=at_least
        ),
        median_figure("- by CPU time", ratios(theirs_cpu, ours_cpu), "x"),
        median_figure("- Paceline", [1 / s for s in ours], "images/s"),
        median_figure("- torchvision", [1 / s for s in theirs], "images/s"),
        median_figure("- A/A: torchvision against itself", same, "x"),
    ]
    report.raw[title] = asdict(blocks)


def main() -> int:
    """Measure and report."""
    arguments = parser(__doc__ or "").parse_args()
    pairs, batches = (8, 2) if arguments.quick else (42, 4)
    torch.set_num_threads(1)
    keep_freed_memory()
    data = random_images(40 * BATCH)
    report = Report(name="input")
    report.remarks = [
        "flip, rotation 10, affine (shear 10, scale 0.8-1.2), jitter 0.2, normalised; "
        f"batch {BATCH} of {CHANNELS}x{SIDE}x{SIDE}, one process of one thread, paired blocks",
        "nearest pixel is torchvision's default, and that of the course",
    ]
    matches: list[tuple[str, Mode, torch.memory_format, float | None]] = [
        ("nearest", "nearest", torch.contiguous_format, AT_LEAST),
        ("nearest, channels last", "nearest", torch.channels_last, AT_LEAST),
        ("bilinear", "bilinear", torch.contiguous_format, AT_LEAST),
    ]
    for title, mode, layout, at_least in matches:
        both = our_batches(data, mode, layout), their_batches(data, mode)
        add_match(report, title, play(*both, pairs, batches), at_least)
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
