"""Batched augmentation against torchvision's by sample, on one core, in interleaved blocks.

    python -m benchmarks.input [--quick] [--json FILE]

The list that most trainings on CIFAR-10 have: padded crop, flip, normalisation. Theirs goes image
by image through PIL, in a Dataset behind a DataLoader with `num_workers=0`; ours is a
`MemorySource`. Blocks alternate (order ABBA) in one process of one thread.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.figures import Report, median_figure, parser, ratios
from benchmarks.random_data import PADDING, OneByOne, cifar_shaped
from paceline.data.augment import RandomFlip, RandomShift
from paceline.data.memory import MemorySource, TensorData
from paceline.data.order import EpochPlan
from paceline.distributed.allocator import keep_freed_memory

BATCH = 256
AT_LEAST = 8.0
_DROPPED = 2


@dataclass(kw_only=True)
class Blocks:
    """Seconds per image of each block: of the clock, and of the process's CPU time."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)
    theirs_cpu: list[float] = field(default_factory=list)


def our_batches(data: TensorData, layout: torch.memory_format) -> Iterator[Tensor]:
    """Give Paceline's batches without end, epoch after epoch."""
    source = MemorySource(data, memory_format=layout, augment=(RandomShift(PADDING), RandomFlip()))
    epoch = 0
    while True:
        for batch in source.train_batches(EpochPlan(seed=0, epoch=epoch, global_batch=BATCH)):
            yield batch.inputs
        epoch += 1


def their_batches(data: TensorData) -> Iterator[Tensor]:
    """Give torchvision's batches without end."""
    loader = DataLoader(OneByOne(data, augment=True), batch_size=BATCH, shuffle=True)
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
    data = cifar_shaped(40 * BATCH)
    report = Report(name="input")
    report.remarks = [
        f"crop after padding by {PADDING}, flip, normalised; "
        f"batch {BATCH} of 3x32x32, one process of one thread, paired blocks",
    ]
    for title, layout in (
        ("contiguous", torch.contiguous_format),
        ("channels last", torch.channels_last),
    ):
        blocks = play(our_batches(data, layout), their_batches(data), pairs, batches)
        add_match(report, title, blocks, AT_LEAST)
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
