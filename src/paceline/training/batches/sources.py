"""What serves the batches of a data set, and what a torch DataLoader says about how."""

from dataclasses import dataclass
from typing import cast, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from paceline.data.augment import Augment
from paceline.data.batch import BatchSource
from paceline.data.fingerprint import data_fingerprint
from paceline.data.loading.dataset_worker import Collate
from paceline.data.loading.loader import LoaderSource
from paceline.data.loading.stream import StreamSource
from paceline.data.memory import MemorySource, PreparedSource, TensorData
from paceline.data.protocols import RawImages
from paceline.distributed.group import Group
from paceline.distributed.startup_facts import WorkerFacts, disagreement
from paceline.errors import JobError, UsageError
from paceline.results.run_directory import SampleUnit
from paceline.training.batches.plan import TrainPlan
from paceline.training.config import TrainConfig
from paceline.training.job import ImageSet

AnyData = ImageSet | Dataset[object] | DataLoader[object]


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

    @property
    def is_stream(self) -> bool:
        """Whether it can only be read from its beginning."""
        return isinstance(self.data, IterableDataset)

    @property
    def unit(self) -> SampleUnit:
        """What the samples are called: images where that is known of them."""
        return "images" if isinstance(self.data, TensorData | RawImages) else "samples"

    def num_samples(self) -> int:
        """Count the samples; 0 where nobody knows."""
        if isinstance(self.data, TensorData):
            return self.data.num_samples
        return 0 if isinstance(self.data, IterableDataset) else len(self.data)


def describe_data(data: AnyData) -> DataSource:
    """Accept a data set, or a DataLoader as a single process would use it.

    Raises:
        UsageError: The DataLoader has a sampler whose order Paceline can't reproduce.
    """
    if not isinstance(data, DataLoader):
        workers = 0 if isinstance(data, TensorDataset) else None  # nothing to wait for
        return DataSource(data=cast(ImageSet, data), loader_workers=workers)
    stream = isinstance(data.dataset, IterableDataset)
    known = stream or type(data.sampler) in (RandomSampler, SequentialSampler)
    if data.batch_size is None or not (stream or type(data.batch_sampler) is BatchSampler):
        raise UsageError(
            "this DataLoader has no batch_size or a batch_sampler of its own; Paceline makes the "
            "batches, the same on any number of workers: give it the data set and global_batch"
        )
    if not known or getattr(data.sampler, "replacement", False):
        raise UsageError(
            f"this DataLoader draws its samples by a {type(data.sampler).__name__}, whose order "
            "can't be shared between workers: give Paceline the data set and shuffle=True or False"
        )
    return DataSource(
        data=cast(ImageSet, data.dataset),
        batch_size=data.batch_size,
        shuffle=isinstance(data.sampler, RandomSampler),
        drop_last=data.drop_last,
        collate=cast(Collate, data.collate_fn),
        loader_workers=data.num_workers,
    )


def compare_data(served: DataSource, group: Group, plan: TrainPlan | None = None) -> None:
    """Refuse data sets that differ between workers: wrong results would follow. Collective.

    Args:
        served: This worker's.
        group: The workers.
        plan: How batches are made of it, for training data.

    Raises:
        JobError: They differ in size, content or batches; names rank, host and both values.
    """
    if group.world_size == 1:
        return
    facts = {"data set": data_fingerprint(served.data)}
    if plan is not None:
        facts["global_batch"] = str(plan.global_batch)
        facts["drop_last"], facts["shuffle"] = str(plan.drop_last), str(plan.shuffle)
    texts = group.gather_texts(WorkerFacts.here(facts).to_json())
    found = disagreement(list(map(WorkerFacts.from_json, texts)))
    if found:
        raise JobError(found)


def make_source(
    served: DataSource,
    config: TrainConfig,
    group: Group,
    channels_last: bool,
    augment: tuple[Augment, ...] = (),
    evaluate_with: tuple[Augment, ...] = (),
) -> BatchSource:
    """Serve a data set: from memory on the device, through a DataLoader, or as a stream.

    Args:
        served: The data set.
        config: Options; how many processes read.
        group: The workers.
        channels_last: Layout of images.
        augment: Changes of training batches, on the device.
        evaluate_with: Changes of evaluation batches, on the device.

    Raises:
        UsageError: Changes on the device of anything but raw images.
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
    raw = isinstance(data, RawImages) and not isinstance(data, IterableDataset)
    if (augment or evaluate_with) and not raw:
        raise UsageError(
            "the job's `augment` and `evaluate_with` work on TensorData and on raw images; put the "
            "transforms into the data set instead"
        )
    if isinstance(data, IterableDataset):
        return StreamSource(data, group, memory_format=layout, collate=served.collate)
    workers = served.loader_workers
    source = LoaderSource(
        data,
        group.device,
        loader_workers=config.data.loader_workers if workers is None else workers,
        memory_format=torch.contiguous_format if raw else layout,
        collate=served.collate,
        # Before the other workers give up on this one, so that the cause is told.
        timeout_s=0.9 * config.dist.timeout_s,
    )
    if not isinstance(data, RawImages):
        return source
    return PreparedSource(
        source,
        data,
        group.device,
        memory_format=layout,
        augment=augment,
        evaluate_with=evaluate_with,
    )
