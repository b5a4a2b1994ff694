"""What a scaling study found, as the page is made from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.report.load_run import JsonObject
from paceline.results.profile import Spread, StepParts

Mode = Literal["weak", "strong"]


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Seconds of an epoch besides its steps; None where they weren't measured."""

    evaluation_s: float | None
    snapshot_s: float | None
    loader_start_s: float | None
    averaging_s: float | None = None
    """Making all weights one at its end: of methods by which workers train apart."""

    @property
    def known(self) -> tuple[float, ...]:
        """Those that were measured."""
        every = (self.evaluation_s, self.snapshot_s, self.loader_start_s, self.averaging_s)
        return tuple(each for each in every if each is not None)

    @property
    def total_s(self) -> float | None:
        """All that was measured; None where nothing was."""
        return sum(self.known) if self.known else None


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """One measurement of a size."""

    run_dir: str
    images_per_s: float | None
    step_s: float | None
    problem: str


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A training after one of its epochs."""

    time_s: float | None
    samples: float | None
    train_loss: float | None
    val_loss: float | None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A whole training of one size."""

    epochs: int | None
    stopped_because: str
    train_time_s: float | None
    best_val_loss: float | None
    best_val_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    curve: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True)
class Size:
    """One number of workers with one method; None where something wasn't measured."""

    workers: int
    nodes: int | None
    method: str
    options: JsonObject
    global_batch: int | None
    lr: float | None
    steps_per_epoch: int | None
    images_per_s: Spread | None
    """Of all workers."""
    step_s: Spread | None
    efficiency: Spread | None
    """A fraction."""
    parts: StepParts | None
    epoch_s: float | None
    fixed: Fixed
    wire_bytes_per_step: float | None
    repeats: tuple[Repeat, ...]
    problem: str
    trained: Trained | None

    @property
    def fixed_share(self) -> float | None:
        """The share of an epoch that its fixed costs take; None where it isn't known."""
        total_s = self.fixed.total_s
        if total_s is None or self.step_s is None or not self.steps_per_epoch:
            return None
        whole_s = total_s + self.steps_per_epoch * self.step_s.median
        return total_s / whole_s if whole_s > 0 else None


@dataclass(frozen=True, kw_only=True)
class PredictedSize:
    """What is expected of one number of workers."""

    workers: int
    nodes: int | None
    efficiency: float
    low: float
    """The band's lower end, a fraction as the efficiency."""
    high: float
    images_per_s: float | None
    step_s: float | None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of sizes by a model that was fitted to the measured ones."""

    text: tuple[str, ...]
    link: JsonObject
    methods: Mapping[str, tuple[PredictedSize, ...]]
    """Each with its sizes in growing order."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """All that is known about a study; empty parts where something is missing."""

    path: Path
    record: JsonObject
    """The whole of `study.json`."""
    mode: Mode
    repeats: int | None
    """How often each size was to be measured."""
    baseline_images_per_s: float | None
    """Of the best run of one worker."""
    not_reliable: str
    """Why no conclusion can be drawn, in words; empty where one can be."""
    notes: tuple[str, ...]
    sizes: tuple[Size, ...]
    """By workers, then in the order of the methods."""
    prediction: Prediction | None
    problems: tuple[str, ...]
    """One sentence for each file that couldn't be read."""

    @property
    def measured(self) -> tuple[Size, ...]:
        """The sizes whose throughput is known."""
        return tuple(size for size in self.sizes if size.images_per_s is not None)
