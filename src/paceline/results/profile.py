"""Where the time of a training's steps goes, as `profile.json` holds it. Imports no torch.

Written by the trainer, read by whoever explains or predicts how a training scales.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from paceline.errors import DataError
from paceline.files import parse_json, read_plain, why_unreadable
from paceline.options.fields import read_dataclass

FORMAT = 1
STRETCH_S = 0.5
"""About how long a stretch of steps is whose time is taken as one, at least a step."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure that was measured several times.

    A measurement of a training's step is a stretch of about a second, by its steps: what
    differs from step to step is averaged out within it.
    """

    median: float
    low: float
    """A tenth of the measurements are below; of a study's repeats, the least."""
    high: float
    """A tenth of the measurements are above; of a study's repeats, the most."""

    @property
    def deviation(self) -> float:
        """Standard deviation where `low` and `high` are tenths, without the few far beyond them.

        A normal distribution has 2.563 of them from its lowest tenth to its highest: 1.2816, the
        quantile of the standard one at 0.9, on each side of the middle.
        """
        return (self.high - self.low) / 2.563


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Seconds of one step by what they are spent on: means over the workers of medians over steps.

    Together they are the step.
    """

    data: float
    """Waiting for the batch."""
    forward: float
    """From the batch to the backward pass: the script's own work, and the loss."""
    backward: float
    """Autograd's own work."""
    exposed: float
    """Communication that isn't hidden behind computation, of the slowest worker; conversion to and
    from fewer bits too, as far as it is waited for."""
    waiting: float
    """Waiting for the slowest worker."""
    optimizer: float
    """Clipping, the optimizer's step, zeroing."""
    other: float
    """What is left: counting, agreeing, showing progress; what PowerSGD computes after the backward
    pass."""


@dataclass(frozen=True, kw_only=True)
class WorkerTime:
    """What one worker computes in a step, without waiting for others."""

    rank: int
    host: str
    compute_s: float
    """Data, forward, backward and optimizer: median over steps."""
    spread_s: float
    """Standard deviation of it over steps."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Gradients that were ready at one time of the backward pass."""

    at_s: float
    """Seconds since the backward pass began."""
    bytes: int


@dataclass(frozen=True, kw_only=True)
class EpochCosts:
    """Seconds of an epoch besides its steps; None where it hasn't happened."""

    evaluation_s: float | None = None
    snapshot_s: float | None = None
    """For how long the training is held up by the one at the end of an epoch."""
    loader_start_s: float | None = None
    """From the beginning of a pass to its first batch."""

    @property
    def total_s(self) -> float | None:
        """All that was measured; None where nothing was."""
        every = (self.evaluation_s, self.snapshot_s, self.loader_start_s)
        known = [cost_s for cost_s in every if cost_s is not None]
        return sum(known) if known else None


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Where the time of a training goes. It has a field for each key of `profile.json`."""

    world_size: int
    nodes: int
    sync: str
    """The method that combines gradients, such as `allreduce`."""
    device: str
    """Such as `cpu` or `cuda`."""
    global_batch: int
    steps_per_epoch: int
    """0 where it isn't known."""
    steps_seen: int
    """Steps that were looked at closely."""
    step_s: Spread
    """Whole steps by the clock."""
    images_per_s: float
    """Of all workers, from the median step."""
    parts: StepParts
    workers: tuple[WorkerTime, ...]
    gradients: tuple[Arrival, ...]
    """In order of arrival on rank 0, at most 256 of them (neighbours merged, time of the last)."""
    gradient_bytes: int
    parameter_bytes: int
    wire_bytes_per_step: float
    """What one worker sends in a step, by the method's own count, on average."""
    epoch: EpochCosts

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Raises:
            DataError: The text is something else.
        """
        try:
            content = parse_json(text)
            if not isinstance(content, dict) or "format" not in content:
                raise ValueError("it names no format")
            if content["format"] != FORMAT:
                raise DataError(
                    f"the profile has format {content['format']}; this Paceline reads {FORMAT}"
                )
            known = {f.name for f in fields(cls)}  # a later version may have more
            profile = read_dataclass(
                cls, {n: v for n, v in content.items() if n in known}, strict=True
            )
            _check_ranges(profile)
            return profile
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"the text isn't a profile of Paceline: {error}") from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a `profile.json`.

        Raises:
            DataError: There is none, or it is damaged; the message names it.
        """
        try:
            return cls.from_json(read_plain(path).decode())
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        except (OSError, ValueError) as error:
            raise DataError(f"can't read {path}: {why_unreadable(error)}") from error


def _check_ranges(profile: StepProfile) -> None:
    """Refuse figures that no training can have: what reads them divides by them.

    Raises:
        ValueError: There is one.
    """
    for name in ("world_size", "nodes", "global_batch"):
        if getattr(profile, name) < 1:
            raise ValueError(f"{name} is {getattr(profile, name)}; it should be at least 1")
    for name in ("steps_per_epoch", "steps_seen", "images_per_s", "gradient_bytes"):
        if getattr(profile, name) < 0:
            raise ValueError(f"{name} is {getattr(profile, name)}; it should be at least 0")
    if profile.step_s.median <= 0:
        raise ValueError(f"a step takes {profile.step_s.median} s; it should be more than 0")
