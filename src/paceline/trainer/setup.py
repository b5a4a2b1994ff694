"""Builds a session: job, device, model, optimizer, data and snapshots, each step in its order."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from paceline.checkpoint.store import SnapshotStore
from paceline.config.rundir import RunDirectory
from paceline.data.loader import LoaderSource
from paceline.data.memory import MemorySource, TensorData
from paceline.data.source import BatchSource
from paceline.dist.group import Group
from paceline.errors import JobError, UsageError
from paceline.launch.boundary import note
from paceline.metrics.console import Console, make_console
from paceline.metrics.counters import StepCounters
from paceline.optim.build import build_optimizer
from paceline.optim.rate import scaled_lr
from paceline.optim.rate_control import RateControl
from paceline.optim.schedule import build_schedule
from paceline.sync.allreduce import replicate
from paceline.sync.batchnorm import synchronise_batchnorm
from paceline.trainer.config import TrainConfig
from paceline.trainer.evaluate import Evaluator
from paceline.trainer.job import ImageSet, Job
from paceline.trainer.keeper import SnapshotKeeper
from paceline.trainer.losses import build_loss
from paceline.trainer.options import ComputeOptions
from paceline.trainer.plan import TrainPlan, make_plan
from paceline.trainer.recorder import Recorder
from paceline.trainer.seeding import generators, step_key
from paceline.trainer.session import Session
from paceline.trainer.signals import StopFlag
from paceline.trainer.state import TrainState
from paceline.trainer.step import Stepper, autocast

_LEAST_EVAL_BATCH = 64
_MOST = 2**31


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the batches of a training come from."""

    train: BatchSource
    validation: BatchSource

    def close(self) -> None:
        """End reader processes."""
        self.train.close()
        self.validation.close()


@contextmanager
def open_session(
    job: Job, config: TrainConfig, run: RunDirectory, group: Group, stop_flag: StopFlag
) -> Iterator[Session]:
    """Set a worker up for a training, from its newest snapshot if there is one. Collective.

    Closes what it opened: snapshots in flight are finished, reader processes ended.
    """
    channels_last = wants_channels_last(config.compute, job)
    sources = Sources(
        train=make_source(job.train, job, config, group.device, channels_last, augmented=True),
        validation=make_source(job.validation, job, config, group.device, channels_last),
    )
    _compare_sizes(sources, group)
    console = make_console(
        config.metrics.progress,
        group.rank,
        run.rank_log(0),
        restarted=group.placement.attempt > 0,
    )
    try:
        session = _build(job, config, run, group, stop_flag, sources, console, channels_last)
        try:
            _start(session)
            yield session
        finally:
            session.keeper.close()
            session.recorder.close()
    finally:
        console.close()
        sources.close()


def _compare_sizes(sources: Sources, group: Group) -> None:
    """Refuse data sets whose sizes differ between workers: wrong results or a hang would follow."""
    own = torch.tensor([sources.train.num_samples, sources.validation.num_samples])
    sizes = group.gather_rows(own).tolist()
    if any(size != sizes[0] for size in sizes):
        found = "; ".join(f"rank {rank}: {a} and {b}" for rank, (a, b) in enumerate(sizes))
        raise JobError(
            "the workers' data sets have different sizes (training and validation samples, "
            f"{found}). A recipe must build the same data on every worker"
        )


def wants_channels_last(options: ComputeOptions, job: Job) -> bool:
    """Choose the memory format: channels-last for networks that convolve images."""
    if options.memory_format != "auto":
        return options.memory_format == "channels-last"
    return any(isinstance(module, nn.Conv2d) for module in job.model.modules())


def make_source(
    images: ImageSet,
    job: Job,
    config: TrainConfig,
    device: torch.device,
    channels_last: bool,
    *,
    augmented: bool = False,
) -> BatchSource:
    """Serve a data set: from memory on the device, or through a DataLoader.

    Raises:
        UsageError: The job augments on the device, which needs `TensorData`.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    if isinstance(images, TensorData):
        augment = job.augment if augmented else ()
        return MemorySource(images, device, memory_format=layout, augment=augment)
    if augmented and job.augment:
        raise UsageError(
            "the job's `augment` works on TensorData; put the transforms into the data set instead"
        )
    return LoaderSource(
        images,
        device,
        loader_workers=config.data.loader_workers,
        memory_format=layout,
        # Before the other workers give up on this one, so that the cause is told.
        timeout_s=0.9 * config.dist.timeout_s,
    )


def count_top(job: Job) -> int:
    """Choose what accuracy is counted: 5 also counts the five best guesses, 0 counts nothing."""
    classes = number_of_classes(job)
    if classes is None:
        return 0
    return 5 if classes > 5 else 1


def number_of_classes(job: Job) -> int | None:
    """Give the number of classes, None where the task isn't classification."""
    if job.num_classes is None and isinstance(job.train, TensorData):
        return job.train.num_classes
    return job.num_classes


def make_evaluator(job: Job, config: TrainConfig, device: torch.device, batch: int) -> Evaluator:
    """Set up how the model is judged, without label smoothing."""
    return Evaluator(
        loss=build_loss(job.loss, label_smoothing=0.0),
        forward_context=autocast(config.compute.precision, device),
        top=count_top(job),
        batch_size=min(
            max(2 * batch, _LEAST_EVAL_BATCH), config.data.max_batch_per_worker or _MOST
        ),
    )


def prepare_model(
    model: nn.Module, options: ComputeOptions, group: Group, channels_last: bool, plan: TrainPlan
) -> nn.Module:
    """Bring a model to the device, in its memory format, with what the options ask for.

    Raises:
        UsageError: Synchronised BatchNorm, and a last batch with fewer samples than workers.
    """
    model = model.to(group.device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if options.sync_batchnorm and group.world_size > 1:
        if plan.micro_batches > 1:
            raise UsageError(
                "--sync-batchnorm can't be combined with --max-batch-per-worker: its statistics "
                "are those of the whole global batch, which has to pass through the model at once"
            )
        last = plan.train_samples % plan.global_batch
        if 0 < last < group.world_size and not plan.drop_last:
            raise UsageError(
                f"the last batch of an epoch has {last} samples for {group.world_size} workers; "
                "with --sync-batchnorm each needs one: use --drop-last or another --global-batch"
            )
        model = synchronise_batchnorm(model, group.device)
    if options.compile:
        model.compile()
    return model


def _build(
    job: Job,
    config: TrainConfig,
    run: RunDirectory,
    group: Group,
    stop_flag: StopFlag,
    sources: Sources,
    console: Console,
    channels_last: bool,
) -> Session:
    plan = make_plan(config.data, group.world_size, sources.train.num_samples)
    model = prepare_model(job.model, config.compute, group, channels_last, plan)
    fp16 = config.compute.precision == "fp16"
    scaler = torch.amp.GradScaler(group.device.type) if fp16 else None
    stepper = _make_stepper(job, config, group, plan, model, scaler)
    keeper = SnapshotKeeper(
        store=SnapshotStore(run.snapshots, config.snapshots.keep_last),
        report=console.warn,
        group=group,
        model=model,
        optimizer=stepper.optimizer,
        counters=stepper.counters,
        scaler=scaler,
    )
    return Session(
        config=config,
        plan=plan,
        group=group,
        model=model,
        channels_last=channels_last,
        stepper=stepper,
        evaluator=make_evaluator(job, config, group.device, plan.micro_batch),
        train_source=sources.train,
        val_source=sources.validation,
        keeper=keeper,
        recorder=_make_recorder(config, run, group, console),
        console=console,
        stop_flag=stop_flag,
        note=note,
        state=TrainState(
            total_steps=stepper.rate.schedule.total_steps, train_samples=plan.train_samples
        ),
    )


def _make_stepper(
    job: Job,
    config: TrainConfig,
    group: Group,
    plan: TrainPlan,
    model: nn.Module,
    scaler: torch.amp.GradScaler | None,
) -> Stepper:
    lr, _ = scaled_lr(config.optim, plan.global_batch)
    optimizer = build_optimizer(config.optim, model.named_parameters(), lr)
    schedule = build_schedule(
        config.optim,
        total_steps=config.loop.epochs * plan.steps_per_epoch,
        steps_per_epoch=plan.steps_per_epoch,
    )
    return Stepper(
        module=replicate(model, group.world_size, group.device),
        loss=build_loss(job.loss, config.loop.label_smoothing),
        optimizer=optimizer,
        rate=RateControl(optimizer, [lr] * len(optimizer.param_groups), schedule),
        counters=StepCounters(count_top(job)),
        forward_context=autocast(config.compute.precision, group.device),
        scaler=scaler,
        clip_norm=config.optim.clip_norm,
        world_size=group.world_size,
        micro_batch=plan.micro_batch,
        step_key=step_key(config.loop.seed, group.rank),
        generators=generators(group.device),
    )


def _make_recorder(
    config: TrainConfig, run: RunDirectory, group: Group, console: Console
) -> Recorder:
    if group.rank != 0:
        return Recorder(None, None, console)
    events: Path | None = run.path / "tensorboard" if config.metrics.tensorboard else None
    return Recorder(run.metrics_csv, events, console)


def _start(session: Session) -> None:
    """Go to the newest snapshot, or to the beginning."""
    restored = session.keeper.restore_newest()
    if restored is not None:
        session.resume(restored)
    session.recorder.start(session.state)
    session.model.train()
    if session.group.world_size > 2:
        for sample in islice(session.val_source.eval_batches(0, 1, 1), 1):
            session.stepper.rehearse(sample)
