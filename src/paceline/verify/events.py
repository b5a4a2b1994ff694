"""What a worker sees of a training, event by event, on disk as a JSON object a line."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

from paceline.verify.tensor_sketch import TensorSketch


@dataclass(frozen=True)
class Began:
    """The first batch, or the first backward pass where batches aren't seen."""

    at_s: float
    """By the machine's monotonic clock."""


@dataclass(frozen=True)
class ModelBuilt:
    """A module was handed over to be trained in parallel, as this rank has built it."""

    by: str
    """`DistributedDataParallel`, or `session`, which has made all ranks alike by then."""
    broadcasts_buffers: bool = True
    frozen: tuple[str, ...] = ()
    """Parameters that needed no gradient then."""


@dataclass(frozen=True)
class PassBegun:
    """A pass over a DataLoader begins."""

    loader: int
    """Stands for the place where it was made."""
    number: int
    sampler: str
    """Name of the sampler's type."""
    replicas: int
    """Ranks between which the sampler shares; 1 where it knows of none."""
    shuffles: bool
    sampler_drops: bool
    loader_drops: bool
    epoch: int
    """As passed to the sampler's set_epoch."""
    samples: int
    """Of the whole data set; 0 where it has no length."""
    batches: int = 0
    """Of the whole pass; 0 where that isn't known."""
    seed: int = 0
    """Of a DistributedSampler."""
    has_epoch: bool = False
    """Whether the sampler's set_epoch was ever called."""
    persists: bool = False
    """Whether its reader processes stay for the next pass."""
    settings: str = ""
    """The data set's own whole numbers, such as an epoch that the script sets."""
    subset: str = ""
    """Hash of the indices of a `Subset`, as random_split makes them; empty for other data sets."""


@dataclass(frozen=True)
class Drawn:
    """A batch was taken from a DataLoader or from Paceline's own."""

    loader: int
    number: int
    """Of the pass, or of the epoch."""
    samples: tuple[str, ...]
    """Each sample's index in the data set, or the hash of its content where it has none."""
    contents: tuple[str, ...]
    """Hashes of the samples' values, after augmentation; empty where these can't be hashed."""
    trains: bool | None = None
    """Whether it is trained on; None where what follows tells."""
    part: int = 0
    """The shard, where a session has several."""
    finite: bool = True
    """Whether all of its floating-point numbers are."""


@dataclass(frozen=True)
class PassEnded:
    """A pass over a DataLoader has ended."""

    loader: int
    number: int
    is_cut: bool
    """Whether we ended it, not the data."""


@dataclass(frozen=True)
class Drew:
    """Random numbers were drawn, from generators in this state."""

    by: str
    """`dropout`: the first one of a step; `step`: anything else in a step; `data 0`: a data set, in
    reader process 0."""
    state: str
    step: int = 0
    """Steps taken before."""


@dataclass(frozen=True)
class Backward:
    """A backward pass began."""

    loss: float
    weight: float = 1.0
    synced: bool | None = None
    """Whether DistributedDataParallel is going to combine its gradients; None without it."""
    fed: tuple[tuple[int, int], ...] = ()
    """Open passes, each a loader and a number, with batches that no backward pass came after yet;
    those apart that were only evaluated."""
    adds: bool = False
    """Whether a parameter that it reaches has a gradient already, which isn't zero."""


@dataclass(frozen=True)
class Moved:
    """Weights that no optimizer has, and that need no gradient, changed within a step."""

    names: tuple[str, ...]
    at: str
    """`file:line` of the backward pass that came after."""


@dataclass(frozen=True)
class Stepped:
    """An optimizer took a step."""

    optimizer: int
    names: tuple[str, ...]
    """Of the parameters, in the optimizer's order."""
    before: tuple[TensorSketch, ...]
    """The weights that the first step began with; empty in later ones."""
    gradients: tuple[TensorSketch | None, ...]
    weights: tuple[TensorSketch, ...]
    buffers: Mapping[str, str]
    """Hashes by name."""
    rates: tuple[float, ...]
    scheduled: int
    """How often schedulers have been stepped so far."""
    state_before: str = ""
    """Hash of the optimizer's state that its first step here began with, where it was wanted."""
    state: str = ""
    """Hash of the optimizer's state after the step, where it was wanted."""


@dataclass(frozen=True)
class Normalised:
    """A BatchNorm took its statistics from this rank's batch alone."""

    module: str


@dataclass(frozen=True)
class Evaluated:
    """A model was run in evaluation mode, with these buffers."""

    buffers: Mapping[str, str]
    weights: tuple[str, ...] = ()
    """Hashes of all models' weights, where they were wanted."""


@dataclass(frozen=True)
class Reduced:
    """The script has combined a small tensor over the ranks."""

    operation: str
    after: tuple[float, ...]


@dataclass(frozen=True)
class Met:
    """This rank has joined the others, or communicated with them for the first time."""

    joined_only: bool
    """Whether it has only made a process group so far."""


@dataclass(frozen=True)
class Figured:
    """A session's evaluation has ended."""

    figures: Mapping[str, float]
    samples: int


@dataclass(frozen=True)
class Clipped:
    """The script has clipped gradients."""


@dataclass(frozen=True)
class Scaled:
    """A GradScaler was asked for a step."""

    scale: float
    skipped: bool = False
    """Whether it has skipped the step, since gradients weren't finite."""


@dataclass(frozen=True)
class Monitored:
    """A schedule that follows a figure (ReduceLROnPlateau) was given one."""

    figure: float


@dataclass(frozen=True)
class Combined:
    """The script itself has combined a tensor over the ranks, between backward pass and step."""


@dataclass(frozen=True)
class Placed:
    """A line of the script has done something for the first time."""

    what: str
    at: str
    """`file:line`."""


@dataclass(frozen=True)
class Printed:
    """Rank 0 has printed a line."""

    line: str
    at: str = ""
    """`file:line` of the script."""


@dataclass(frozen=True)
class Wrote:
    """The script has opened a file below its working directory to write, for the first time."""

    path: str
    """From the working directory."""
    at: str
    before_group: bool
    """Whether the ranks had no process group yet."""


@dataclass(frozen=True)
class FileRead:
    """Before its first batch the script has opened a file of tensors that it hasn't written."""

    path: str
    """From the working directory, where it is below that."""
    at: str


@dataclass(frozen=True)
class Loaded:
    """A model was given weights by load_state_dict(strict=False), and not all names matched."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    at: str


@dataclass(frozen=True)
class Ended:
    """The training's end, in order."""

    is_cut: bool
    """Whether we ended it."""
    torch: str = ""
    """Version of PyTorch."""
    libraries: tuple[str, ...] = ()
    """Of those that train for a script: `Lightning`, `Transformers`, `Accelerate`."""


Event = (
    Began
    | ModelBuilt
    | PassBegun
    | Drawn
    | PassEnded
    | Drew
    | Backward
    | Moved
    | Stepped
    | Normalised
    | Evaluated
    | Reduced
    | Met
    | Figured
    | Clipped
    | Scaled
    | Monitored
    | Combined
    | Placed
    | Printed
    | Wrote
    | FileRead
    | Loaded
    | Ended
)
_KINDS: Mapping[str, type] = {kind.__name__: kind for kind in Event.__args__}


@final
@dataclass
class EventWriter:
    """Appends events to a file."""

    path: Path
    pid: int = field(default_factory=os.getpid)

    def write(self, event: Event) -> None:
        """Append one; it is on its way to the disk when this returns.

        Of what forked processes do only the draws of readers count.
        """
        if os.getpid() != self.pid and not isinstance(event, Drew):
            return
        line = json.dumps([type(event).__name__, asdict(event)])
        with self.path.open("a") as file:
            file.write(line + "\n")

    @property
    def size(self) -> int:
        """Bytes that were written so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def forget(self, size: int) -> None:
        """Remove the events written since the file had this size."""
        os.truncate(self.path, size)


def read_events(path: Path) -> list[Event]:
    """Read what was written; the last line may be torn where the worker was killed."""
    return list(_read(path)) if path.exists() else []


def _read(path: Path) -> Iterator[Event]:
    for line in path.read_text().splitlines():
        try:
            kind, content = json.loads(line)
        except ValueError:
            return
        event: Event = _KINDS[kind](**{n: _restored(n, v) for n, v in content.items()})
        yield event


def _restored(name: str, value: object) -> object:
    if name in ("before", "gradients", "weights") and isinstance(value, list):
        return tuple(TensorSketch(**v) if isinstance(v, dict) else v for v in value)
    if isinstance(value, list):
        return tuple(tuple(v) if isinstance(v, list) else v for v in value)
    return value
