"""How a script's loop uses the session's loaders: what is told, and what is refused."""

import gc
from collections.abc import Iterable
from itertools import islice
from types import GeneratorType

import torch

from paceline.data.batch import Batch
from paceline.errors import UsageError
from paceline.training.batches.loader import EvalLoader, Loader

_STEP_ON_EVAL_BATCH = (
    "a step on a batch to evaluate on: workers may have unequal numbers of these. To train on data "
    "in its own order: s.loader(data, shuffle=False)"
)
_BEFORE_BEGIN = (
    "a step before the training has begun: it is counted and saved nowhere. The loop is `for epoch "
    "in s.epochs(count):` in the place of range(count); without a training loader `for step in "
    "s.steps(count):`, or s.begin() before it. What comes before the training (a warm-up, a search "
    "for the learning rate) comes before s.prepare(...)"
)
EARLY = "Register models, optimizers and loaders before s.epochs() or s.begin()"
LATE_LOADER = (
    ". One loader serves all epochs: samples that come in later epochs only are left to a sampler "
    "with set_epoch, which draws as many in each; images that grow are resized in the loop"
)
DONE_TWICE = (
    "resumed within an epoch, whose loop has run its lines before the first batch a second time; "
    "what they change is as in the snapshot again: {names}"
)
_BEHIND_LOADER = (
    "a step after the training loader's last batch of the epoch: such steps aren't counted, and "
    "nothing is saved before the epoch's end. Where the loop goes by another loader, give that one "
    "to the session first"
)
WITHOUT_STEP = (
    "an epoch has ended without a step: its loop over the training loader was left before the "
    "first, by `break`, or as the other loader of a zip() gave nothing"
)
_WITHOUT_LOADER = (
    "a step within s.epochs() without a training loader that the session knows: each worker trains "
    "on whatever the script gives it there, steps aren't counted, and nothing within an epoch is "
    "saved. Give the DataLoader to s.prepare(...) or s.loader(...); a loop without one is for "
    "s.steps(count)"
)
ELSEWHERE = (
    "the training loader is iterated in another thread, ahead of the steps: giving a batch begins "
    "a step, and asking for the next one ends it. Iterate it where the steps are: it reads ahead "
    "by itself, --loader-workers"
)
_READ_AHEAD = (
    "the loop asks for the next batch before it has trained on the one before, as a prefetcher "
    "does: a step behind the epoch's last batch, while another batch had none. Losses are weighed "
    "by the shares of another batch, and nothing is saved within an epoch. Iterate the training "
    "loader itself: it reads ahead, and gives batches on the device"
)
COUNTED_FROM_ZERO = (
    "resumed behind batch {place} of this epoch, while enumerate() begins to count anew: if the "
    "loop decides anything by that number (a learning rate, every n-th batch), let it begin where "
    "the epoch stands: enumerate(batches, s.step_in_epoch)"
)


def remark_alone(
    counts_by: str | None, knows_loader: bool, is_behind: bool, skipped: int
) -> str | None:
    """Say what is wrong about a step that no batch of the training loader belongs to.

    Args:
        counts_by: What steps are counted by; None before the training.
        knows_loader: Whether the session knows a training loader.
        is_behind: Whether that has given all batches of the epoch.
        skipped: How many of them had no step.
    """
    if counts_by is None:
        return _BEFORE_BEGIN
    if counts_by != "batches":
        return None
    if not knows_loader:
        return _WITHOUT_LOADER
    if not is_behind:
        return None
    return _READ_AHEAD if skipped else _BEHIND_LOADER


def refuse_eval_batch(loaders: Iterable[Loader | EvalLoader]) -> None:
    """Refuse a step while batches to evaluate on are gone through.

    Raises:
        UsageError: One of the loaders is such a one, and running.
    """
    if any(isinstance(loader, EvalLoader) and loader.is_running for loader in loaders):
        raise UsageError(_STEP_ON_EVAL_BATCH)


def refuse_beside_training(batch: Batch | None, *, is_used: bool, shards: int | None) -> None:
    """Refuse a batch to evaluate on that comes between a batch to train on and its loss.

    Args:
        batch: The one that the script has to train on, if any.
        is_used: Whether its loss has been there.
        shards: Of the training.

    Raises:
        UsageError: The script is in a step; where nothing is trained on it (`torch.no_grad`) it
            may be.
    """
    if batch is None or is_used or not torch.is_grad_enabled():
        return
    if shards is not None:
        refuse_further(shards, is_first=False)
    raise UsageError(
        f"{_STEP_ON_EVAL_BATCH}. To evaluate within a step: s.evaluate(...), or torch.no_grad()"
    )


def refuse_further(shards: int | None, *, is_first: bool) -> None:
    """Refuse a second training loader in reproducible mode.

    Raises:
        UsageError: It is one: its batches would be paired with other shards of the first.
    """
    if shards is not None and not is_first:
        raise UsageError(
            "--shards can't be combined with a second training loader: which of its samples meet "
            "which shard would follow the number of workers. Put both into one data set"
        )


def refuse_between_shards(batch: Batch | None, call: str) -> None:
    """Refuse what all workers do together while one of them may be between two shards. Local.

    Args:
        batch: The one that the script has, if any.

    Raises:
        UsageError: The script is within a step.
    """
    if batch is not None and not batch.last:
        raise UsageError(
            f"{call} between two shards of a step: with --shards the workers have unequal "
            "numbers of batches, and meet where the weights have been updated: "
            f"if s.step(loss): {call}. Count steps there too, rather than batches"
        )


def counts_from() -> int | None:
    """Give the number that `enumerate` has for the first batch of the loop that asks for one now.

    Whatever stands between the two, such as a progress bar or a zip, is running then.

    Returns:
        None where the loop isn't counted so.
    """
    for counted in gc.get_objects():
        if type(counted) is enumerate and any(map(_is_running, gc.get_referents(counted))):
            inner = counted.__reduce__()[1]  # the iterator, and the number
            return int(inner[1])
    return None


def _is_running(iterator: object) -> bool:
    if isinstance(iterator, (zip, map, islice, tuple)):  # a zip has its iterators in a tuple
        return any(map(_is_running, gc.get_referents(iterator)))
    return isinstance(iterator, GeneratorType) and iterator.gi_running


def refuse_pass(*, is_open: bool, passed: bool) -> None:
    """Refuse a pass over the training loader that no epoch counts.

    Raises:
        UsageError: No epoch is open, or it has had its pass.
    """
    if not is_open:
        raise UsageError(
            "the training loader gives its batches within an epoch: put the loop over it into "
            "`for epoch in s.epochs():`. To look at a sample before, ask the data set; what goes "
            "through the data before the training (a search for the learning rate) does so by its "
            "own DataLoader, before s.prepare(...)"
        )
    if passed:
        raise UsageError(
            "the training loader has been iterated in this epoch already: its batches are one "
            "pass. For further passes make another loader, s.loader(...)"
        )
