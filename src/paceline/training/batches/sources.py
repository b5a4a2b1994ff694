"""Chooses the batch source for a data set, and reads settings from a torch DataLoader."""

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, cast, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from paceline.data.augment import Augment
from paceline.data.batch import BatchSource
from paceline.data.fingerprint import data_fingerprint, picked_samples
from paceline.data.loading.dataset_worker import Collate, WorkerInit
from paceline.data.loading.loader import LoaderSource
from paceline.data.loading.sampled import SampledOrder
from paceline.data.loading.stream import StreamSource
from paceline.data.memory import MemorySource, TensorData
from paceline.distributed.group import Group
from paceline.distributed.startup_facts import WorkerFacts, disagreement
from paceline.errors import JobError, UsageError
from paceline.results.run_directory import SampleUnit
from paceline.training.batches.plan import TrainPlan
from paceline.training.config import TrainConfig
from paceline.training.job import ImageSet

AnyData: TypeAlias = "ImageSet | Dataset[object] | DataLoader[object] | DataSource"

SUBSET_ADVICE = (
    "Where a Subset's samples are drawn before paceline.session() without a seed, as by "
    "torch.utils.data.random_split, each process draws its own, and a resumed training draws "
    "others. Split behind paceline.session(), or give random_split a "
    "generator=torch.Generator().manual_seed(0)"
)
"""Cause and remedy where a subset isn't the same everywhere."""


_PICKED = "samples in its Subset"


@final
@dataclass(frozen=True, kw_only=True)
class DataSource:
    """A data set and how its batches are asked for."""

    data: ImageSet | IterableDataset[object]
    batch_size: int | None = None
    """From a DataLoader; None where it says nothing."""
    shuffle: bool | None = None
    drop_last: bool = False
    collate: Collate = default_collate
    loader_workers: int | None = None
    worker_init: WorkerInit | None = None
    order: SampledOrder | None = None
    """By which its samples are drawn, where the script has a sampler of its own."""

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read from its beginning."""
        return isinstance(self.data, IterableDataset)

    @property
    def unit(self) -> SampleUnit:
        """What the samples are called: images where that is known of them."""
        return "images" if isinstance(self.data, TensorData) else "samples"

    @property
    def batch_sizes(self) -> list[int]:
        """Of each step of an epoch, where the script makes the batches; else empty."""
        return self.order.sizes if self.order is not None else []

    @cached_property
    def picked_samples(self) -> str:
        """Which samples torch's `Subset`s pick; hashed once, and as they are then."""
        return picked_samples(self.data)

    def num_samples(self) -> int:
        """Count the samples of a pass; 0 if the number is unknown."""
        if self.order is not None:
            return len(self.order)
        if isinstance(self.data, TensorData):
            return self.data.num_samples
        return 0 if isinstance(self.data, IterableDataset) else len(self.data)


def describe_data(data: AnyData, seed: int = 0) -> DataSource:
    """Accept a data set, or a DataLoader as a single process would use it.

    Args:
        seed: The training's; a sampler of the script's own draws by it.

    Raises:
        UsageError: The DataLoader doesn't say how a batch is made of samples that are drawn.
    """
    if isinstance(data, DataSource):
        return data
    if not isinstance(data, DataLoader):
        workers = 0 if isinstance(data, TensorDataset) else None  # nothing to wait for
        return DataSource(data=cast(ImageSet, data), loader_workers=workers)
    _refuse_own_iteration(data)
    if isinstance(data.dataset, IterableDataset):
        return _describe_stream(data)
    batches = data.batch_sampler
    if batches is None:
        raise UsageError(
            "this DataLoader has batch_size=None: its data set gives whole batches, which can't be "
            "shared between workers. Let the data set give samples, and say batch_size"
        )
    if type(batches) is not BatchSampler:
        return _describe_batches(data, batches, seed)
    order = _own_order(cast(Sampler[int], batches.sampler), data.dataset, seed)
    return DataSource(
        data=cast(ImageSet, data.dataset),
        batch_size=batches.batch_size,
        shuffle=order is not None or isinstance(batches.sampler, RandomSampler),
        drop_last=batches.drop_last,
        collate=cast(Collate, data.collate_fn),
        loader_workers=data.num_workers,
        worker_init=data.worker_init_fn,
        order=order,
    )


def _refuse_own_iteration(loader: DataLoader[object]) -> None:
    """Refuse a kind of DataLoader that changes the batches on their way, or may do so.

    Raises:
        UsageError: Its class has a way of its own to give batches, which nothing would call.
    """
    kind = type(loader)
    for name in ("__iter__", "_get_iterator"):
        owner = next(one for one in kind.__mro__ if name in vars(one))
        # torchdata's StatefulDataLoader has one to keep its place alone, which s.prepare does too.
        if owner.__module__.partition(".")[0] not in ("torch", "torchdata"):
            raise UsageError(
                f"{kind.__name__} is a DataLoader with its own {name}, which would be left out: "
                "the data set is read without it, so that workers can share each batch. What it "
                "does to batches belongs into the data set, collate_fn or the loop; reading ahead "
                "and keeping processes is done anyway. Use a plain torch DataLoader"
            )


def batch_of(served: DataSource, given: int | None, *, trains: bool) -> int | None:
    """Settle how many samples a batch has: as the script says, else as its DataLoader does.

    Raises:
        UsageError: The DataLoader's batches have sizes of their own.
    """
    if served.batch_sizes and not trains:
        raise UsageError(
            "this DataLoader has a batch_sampler, whose batches can't be evaluated on: workers "
            "share a data set's samples there. Give it a batch_size instead"
        )
    if served.batch_sizes and given is not None:
        raise UsageError(
            f"global_batch={given} beside a DataLoader with a batch_sampler, which settles the "
            "size of each batch: leave one of the two out"
        )
    return given if given is not None else served.batch_size


def _describe_batches(
    data: DataLoader[object], sampler: Iterable[list[int]], seed: int
) -> DataSource:
    """Take over a sampler that makes the batches itself, of any size."""
    if isinstance(data.dataset, TensorData):
        raise UsageError(
            f"this DataLoader's batches are made by a {type(sampler).__name__}, which TensorData "
            "doesn't support: give Paceline the data set and a batch size"
        )
    order = SampledOrder(sampler, seed, in_batches=True, samples=_size_of(data.dataset))
    if not order.sizes:
        raise UsageError(f"the {type(sampler).__name__} gives no batch")
    return DataSource(
        data=cast(ImageSet, data.dataset),
        batch_size=max(order.sizes),
        shuffle=True,
        collate=cast(Collate, data.collate_fn),
        loader_workers=data.num_workers,
        worker_init=data.worker_init_fn,
        order=order,
    )


def _describe_stream(data: DataLoader[object]) -> DataSource:
    if data.batch_size is None:
        raise UsageError(
            "this DataLoader has batch_size=None: its stream gives whole batches, which can't be "
            "shared between workers. Let the stream give samples, and say batch_size"
        )
    return DataSource(
        data=cast(IterableDataset[object], data.dataset),
        batch_size=data.batch_size,
        shuffle=False,
        drop_last=data.drop_last,
        collate=cast(Collate, data.collate_fn),
        loader_workers=data.num_workers,
    )


def shuffles(served: DataSource, shuffle: bool | None) -> bool:
    """Settle whether each epoch has an order of its own that the session makes.

    Args:
        shuffle: What the script says besides.

    Raises:
        UsageError: A sampler of the script's own settles the order.
    """
    if served.order is None:
        return (served.shuffle if shuffle is None else shuffle) is not False
    if shuffle is not None:
        raise UsageError(
            f"shuffle={shuffle} beside a DataLoader whose {type(served.order.sampler).__name__} "
            "settles the order: leave one of the two out"
        )
    return False


def _own_order(sampler: Sampler[int], data: object, seed: int) -> SampledOrder | None:
    """Take over a sampler whose order isn't that of the data set, or a permutation of it.

    Raises:
        UsageError: It shares samples between workers itself, or can't be taken over.
    """
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"this DataLoader's {name} shares samples between workers, which Paceline does: leave "
            "it out, and say shuffle=True or False and the batch size of all workers together"
        )
    # These two orders Paceline makes itself, without the sampler.
    whole = isinstance(data, Sized) and getattr(sampler, "num_samples", len(data)) == len(data)
    if type(sampler) is SequentialSampler:
        return None
    if type(sampler) is RandomSampler and not sampler.replacement and whole:
        return None
    if isinstance(data, TensorData):
        raise UsageError(
            f"this DataLoader draws its samples by a {name}, which TensorData doesn't support: "
            "give Paceline the data set and shuffle=True or False"
        )
    return SampledOrder(sampler, seed, samples=_size_of(data))


def _size_of(data: object) -> int:
    return len(data) if isinstance(data, Sized) else 0


def compare_data(served: DataSource, group: Group, plan: TrainPlan | None = None) -> None:
    """Refuse data sets that differ between workers: wrong results would follow. Collective.

    Args:
        plan: How batches are made of it, for training data.

    Raises:
        JobError: They differ in size, content or batches; names rank, host and both values.
    """
    if group.world_size == 1:
        return
    facts = {"data set": data_fingerprint(served.data)}
    if served.order is not None:
        facts["order of samples"] = (
            f"{type(served.order.sampler).__name__}: {served.order.checksum}"
        )
    if plan is not None:
        facts["global_batch"] = str(plan.global_batch)
        facts["drop_last"], facts["shuffle"] = str(plan.drop_last), str(plan.shuffle)
    if served.picked_samples:
        facts[_PICKED] = served.picked_samples
    # Every worker compares the same facts, so that all raise the same error.
    texts = group.gather_texts(WorkerFacts.here(facts).to_json())
    workers = list(map(WorkerFacts.from_json, texts))
    if found := disagreement(workers):
        drawn_apart = len({worker.facts.get(_PICKED) for worker in workers}) > 1
        raise JobError(f"{found}. {SUBSET_ADVICE}" if drawn_apart else found)


def make_source(
    served: DataSource,
    config: TrainConfig,
    group: Group,
    channels_last: bool,
    augment: tuple[Augment, ...] = (),
    evaluate_with: tuple[Augment, ...] = (),
) -> BatchSource:
    """Serve a data set: from memory on the device, through a DataLoader, or as a stream.

    Raises:
        UsageError: Changes on the device of anything but `TensorData`.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    data = served.data
    if isinstance(data, TensorData):
        return MemorySource(
            data,
            group.device,
            memory_format=layout,
            augment=augment,
            evaluate_with=evaluate_with,
        )
    if augment or evaluate_with:
        raise UsageError(
            "the job's `augment` and `evaluate_with` work on TensorData; put the transforms into "
            "the data set instead"
        )
    if isinstance(data, IterableDataset):
        return StreamSource(data, group, memory_format=layout, collate=served.collate)
    workers = served.loader_workers
    return LoaderSource(
        data,
        group.device,
        loader_workers=config.data.loader_workers if workers is None else workers,
        memory_format=layout,
        collate=served.collate,
        # Before the other workers give up on this one, so that the cause is told.
        timeout_s=0.9 * config.dist.timeout_s,
        order=served.order,
        worker_init=served.worker_init,
    )
