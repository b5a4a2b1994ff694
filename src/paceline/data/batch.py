"""`Batch`, and `BatchSource`: the interface between the training loop and every data set."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.data.order import EpochPlan, Indices
from paceline.errors import DataError, UsageError

_SEQUENCES = (tuple, list)


def as_pair(content: object) -> tuple[Tensor, Tensor]:
    """Take a batch's content as inputs and targets.

    Raises:
        DataError: It is something else.
    """
    if isinstance(content, _SEQUENCES) and len(content) == 2:
        inputs, targets = content
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return inputs, targets
    raise DataError(
        f"the batches of this data set are {describe(content)}, but a recipe's have to be "
        "pairs of tensors: let each item of the data set be (input, target)"
    )


@dataclass(slots=True, eq=False)
class Batch:
    """Samples of one part of a step, or a piece of them. Not frozen: one is made every step.

    The part is what one worker has of the step, or with shards one of its shards.
    """

    content: object
    """Tensors whose first dimension is samples, on the worker's device; in tuples, lists,
    dictionaries and dataclasses as the data set gives them. Usually the pair (inputs, targets)."""
    local: int
    """Samples in it. 0 is possible (a short last batch on many workers): the content then
    holds one stand-in sample, so that the model can run, to be weighted with 0."""
    total: int
    """Samples in the global batch, over all workers. In evaluation: the same as `local`."""
    indices: Indices
    """Indices of the samples in the data set, (local,)."""
    last: bool = True
    """False for every piece of a step but its last."""
    part: int = 0
    """The shard that these samples are, or belong to, where a step has several."""

    def pair(self) -> tuple[Tensor, Tensor]:
        """Take the content as inputs and targets.

        Raises:
            DataError: It is something else.
        """
        return as_pair(self.content)

    @property
    def inputs(self) -> Tensor:
        """The first of the pair."""
        return self.pair()[0]

    @property
    def targets(self) -> Tensor:
        """The second of the pair."""
        return self.pair()[1]


def pieces(batch: Batch, most: int) -> Iterator[Batch]:
    """Cut a batch into pieces of at most `most` samples, in order.

    Raises:
        UsageError: It holds what can't be cut.
    """
    if batch.local <= most:
        yield batch
        return
    for start in range(0, batch.local, most):
        stop = min(start + most, batch.local)
        yield replace(
            batch,
            content=_rows(batch.content, slice(start, stop), batch.local),
            local=stop - start,
            indices=batch.indices[start:stop],
            last=batch.last and stop == batch.local,
        )


def map_tensors(
    content: object,
    change: Callable[[Tensor], Tensor],
    movable: Callable[[object], object] | None = None,
) -> object:
    """Apply a function to every tensor of a batch, keeping what holds them.

    Args:
        content: Tensors, and tuples, lists, dictionaries and dataclasses of them, at any depth.
        movable: What becomes of an object with a method `to` of its own, such as a batch of graphs
            or a `PackedSequence`; without it such a one is like any other.
    """

    def changed(value: object) -> object:
        """Change one value, and what it holds."""
        if isinstance(value, Tensor):
            return change(value)
        if movable is not None and _moves_itself(value):
            return movable(value)
        return _rebuilt(value, changed)

    return changed(content)


def move_whole(content: object, device: torch.device) -> object:
    """Move what moves itself, by its own method `to`; tensors stay where they are."""

    def moved(value: object) -> object:
        move: Callable[[torch.device], object] = value.to  # type: ignore[attr-defined]  # has it
        return move(device)

    return map_tensors(content, lambda tensor: tensor, moved)


def _moves_itself(value: object) -> bool:
    return not isinstance(value, Mapping) and callable(getattr(value, "to", None))


def _rebuilt(content: object, change: Callable[[object], object]) -> object:
    """Apply a function to each element of a container; other values are returned unchanged."""
    if isinstance(content, Mapping):
        changed = {key: change(value) for key, value in content.items()}
        return changed if type(content) is dict else _like(content, changed)
    if isinstance(content, tuple) and hasattr(content, "_fields"):  # a named tuple
        make: Callable[..., object] = type(content)
        return make(*map(change, content))
    if isinstance(content, tuple):
        return tuple(map(change, content))
    if isinstance(content, list):
        return list(map(change, content))
    if is_dataclass(content) and not isinstance(content, type):
        made = copy(content)
        for field in fields(content):  # also where it is frozen, without running its __init__ again
            object.__setattr__(made, field.name, change(getattr(content, field.name)))
        return made
    return content


def _rows(content: object, kept: slice, samples: int) -> object:
    """Take some of a batch's samples, of everything that it holds.

    Args:
        content: Of the batch, or a part of it. A tuple or list with an element for each sample is
            cut itself, unless its elements are whole tensors of all samples.

    Raises:
        UsageError: Nobody knows how to cut it.
    """
    if isinstance(content, Tensor | np.ndarray) and content.ndim:
        if len(content) == samples:
            return content[kept]
    elif isinstance(content, tuple | list) and not hasattr(content, "_fields"):
        if len(content) == samples and not all(_has_rows(value, samples) for value in content):
            return content[kept]
        return _rebuilt(content, lambda value: _rows(value, kept, samples))
    elif content is None or isinstance(content, Tensor | np.ndarray | str | int | float):
        return content
    elif isinstance(content, Mapping | tuple) or is_dataclass(content):
        return _rebuilt(content, lambda value: _rows(value, kept, samples))
    shape = f" of shape {tuple(content.shape)}" if isinstance(content, Tensor | np.ndarray) else ""
    raise UsageError(
        f"--max-batch-per-worker cuts a batch into pieces by the first dimension of its tensors, "
        f"and this one of {samples} samples holds a {type(content).__name__}{shape}: give each "
        "tensor the samples as its first dimension, or leave --max-batch-per-worker out"
    )


def _has_rows(value: object, samples: int) -> bool:
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0 and len(value) == samples


def describe(content: object) -> str:
    """Name the type of a batch for a message, such as `a tuple of Tensor, Tensor, str`."""
    if type(content) in (tuple, list):
        kinds = ", ".join(type(value).__name__ for value in content)  # type: ignore[attr-defined]
        return f"a {type(content).__name__} of {kinds}"
    if isinstance(content, Mapping):
        return f"a {type(content).__name__} with {', '.join(map(str, content))}"
    return f"a {type(content).__name__}"


def _like(original: Mapping[object, object], changed: dict[object, object]) -> object:
    """Give the mapping type of a library (a tokenizer's batch) back, where it can be built so."""
    try:
        return type(original)(changed)  # type: ignore[call-arg]  # most mappings take one
    except TypeError:
        return changed


def laid_out(content: object, *, channels_last: bool) -> object:
    """Give all four-dimensional tensors of a batch's content the wanted memory format."""
    if not channels_last:
        return content
    return map_tensors(content, lambda t: to_channels_last(t) if t.ndim == 4 else t)


def to_channels_last(images: Tensor) -> Tensor:
    """Lay images out with channels last, also where there is only one channel.

    `Tensor.to(memory_format=...)` leaves one-channel images as they are, since both layouts fit
    their bytes; a convolution then takes them for contiguous ones and the layers after it work in
    the slower layout. Strides that only fit channels-last make it real, without a copy.

    Args:
        images: (N, C, H, W).
    """
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    return images.contiguous()[:, 0, :, :, None].permute(0, 3, 1, 2)


class BatchSource(ABC):
    """Makes batches on one worker's device.

    No method communicates with other workers, but those of a stream.
    """

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Size of the data set; the same on every worker."""

    @abstractmethod
    def train_batches(self, plan: EpochPlan) -> Iterator[Batch]:
        """Give one worker's batches of one epoch, augmented, in the epoch's global order.

        Called once an epoch, or at any step of it after a resume (`plan.first_step`); gives exactly
        one batch for every step that is left. Only the newest iterator of a source is used.
        """

    @abstractmethod
    def read_ahead(self, plan: EpochPlan) -> None:
        """Begin to read what `train_batches` will soon be asked for, if the training goes on: an
        epoch is over, and its evaluation and snapshot take their time. Doesn't wait.

        Nothing happens where no other process reads; a source that wraps another passes it on.
        """

    @abstractmethod
    def eval_batches(self, part: int, parts: int, batch_size: int) -> Iterator[Batch]:
        """Give one worker's contiguous share of all samples, in their own order, not augmented.

        Over all parts every sample comes exactly once. The last batch may be short; a part without
        samples gives no batch, so that the parts may differ in their number of batches.
        """

    @abstractmethod
    def describe(self) -> str:
        """Say in one line what the data is and how it is read, for the user."""

    @abstractmethod
    def close(self) -> None:
        """End reader processes, if any. Called once when the training is over; safe to repeat."""
