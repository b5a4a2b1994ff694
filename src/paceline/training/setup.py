"""Builds a worker's session: context, gradient synchronisation, hooks and engine, in order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

from paceline.data.batch import Batch
from paceline.distributed.device import is_accelerator
from paceline.distributed.group import Group
from paceline.distributed.node_rows import rows_in_memory
from paceline.distributed.shared_storage import shared_between_nodes
from paceline.distributed.work_division import Division
from paceline.gradient_sync.registry import sync_methods
from paceline.gradient_sync.replica_consistency import ReplicaConsistency
from paceline.launch.heartbeat import note
from paceline.launch.watchdog.sidecar import WatchedWorkers, watched
from paceline.metrics.console import Console, make_console
from paceline.metrics.counters import StepCounters
from paceline.optim.loss_scaler import LossScaler
from paceline.options.entry_points import imported
from paceline.results.run_directory import RunDirectory
from paceline.training.components import Components
from paceline.training.config import TrainConfig
from paceline.training.context import TrainingContext
from paceline.training.engine import Engine
from paceline.training.evaluation.validation import Validation
from paceline.training.hooks.base import StepHook, StepHooks, overrides
from paceline.training.hooks.metrics_logger import MetricsLogger
from paceline.training.hooks.observer import OBSERVER, TrainingObserver
from paceline.training.hooks.step_checks import (
    LoopChecks,
    RareReplicaChecks,
    ReplicaChecks,
    ReproducibilityChecks,
    StreamChecks,
    SubsetChecks,
)
from paceline.training.loss_weights import LossWeights
from paceline.training.optimizer_step import OptimizerStep
from paceline.training.profiling.gpu_monitor import GpuMonitor
from paceline.training.profiling.profile_writer import Profiler
from paceline.training.profiling.step_profiler import StepProfiler
from paceline.training.progress import TrainingProgress
from paceline.training.rng import RandomStreams
from paceline.training.run_record.numerics import NumericsRecord
from paceline.training.session import Session
from paceline.training.snapshots.manager import SnapshotManager
from paceline.training.status_exchange import StopFlag
from paceline.training.sync.base import GradientSync
from paceline.training.sync.buffer_averaging import BufferAverager
from paceline.training.sync.validation import (
    check_every,
    method_of,
    refuse_backend,
)


def _quiet(engine: Engine) -> None:
    """Announce nothing."""


@contextmanager
def open_session(
    config: TrainConfig,
    run: RunDirectory,
    group: Group,
    stop_flag: StopFlag,
    *,
    given: frozenset[str] = frozenset(),
    own_options: Sequence[str] = (),
    announce: Callable[[Engine], None] = _quiet,
    unseeded: bool = False,
) -> Iterator[Session]:
    """Open a session, and close what it opened: snapshots in flight, reader processes. Collective.

    Args:
        config: The options.
        run: The run directory; made already.
        group: The workers.
        stop_flag: Set when a signal asks the training to stop.
        given: Names of the options that the command line or the environment gave.
        own_options: Options of an optimizer that hold as they are now, whatever a snapshot says.
        announce: Called once the position is known.
        unseeded: Whether torch has drawn random numbers without a seed before.
    """
    console = make_console(
        config.metrics.progress,
        group.rank,
        run.rank_log(0),
        restarted=group.placement.attempt > 0,
    )
    group.listener = note
    note.has_begun = False  # of an earlier session of this process
    with ExitStack() as opened:
        opened.callback(console.close)
        opened.enter_context(rows_in_memory(group))
        engine = _build(config, run, group, stop_flag, console, own_options, announce, opened)
        opened.callback(engine.release)
        opened.callback(engine.snapshots.close)
        with _watched(config, run, group):
            yield Session(engine, given, unseeded=unseeded)


def _watched(config: TrainConfig, run: RunDirectory, group: Group) -> AbstractContextManager[None]:
    """Start a watchdog process, for one of several workers that no launcher of ours watches."""
    limits, place = config.hang_limits(), group.placement
    if limits is None or place.source == "alone" or group.world_size == 1:
        return nullcontext()
    workers = WatchedWorkers(
        log_dir=run.logs,
        rank=group.rank,
        workers=place.local_world_size,
        world_size=group.world_size,
        node=place.node_rank,
        attempt=place.attempt,
        limits=limits,
    )
    return watched(note, workers, starts=place.local_rank == 0)


def _build(
    config: TrainConfig,
    run: RunDirectory,
    group: Group,
    stop_flag: StopFlag,
    console: Console,
    own_options: Sequence[str],
    announce: Callable[[Engine], None],
    opened: ExitStack,
) -> Engine:
    context = _context(config, run, group, console, own_options)
    if context.gpu is not None:
        opened.callback(context.gpu.close)
    hooks = context.hooks
    # Step hooks, in the order of their calls, and the gradient synchronisation among them.
    if (observer := OBSERVER.get()) is not None:
        _observe(observer, context)
    context.profiler.wire_bytes = lambda: sum(model.wire_bytes for model in context.replicas)
    sync = make_sync(context)
    if overrides(sync, GradientSync, "begin_step"):
        hooks.begin_step.insert(0, sync.begin_step)  # it settles the random numbers of a shard
    for hook in _hooks(context, sync, opened):
        hooks.add(hook)
    counters = StepCounters(top=None, parts=context.division.parts_of(group.rank))
    return Engine(
        context=context,
        sync=sync,
        losses=LossWeights(context, sync),
        counters=counters,
        snapshots=SnapshotManager(context, sync, counters, note),
        stop_flag=stop_flag,
        note=note,
        announce=announce,
        step=context.step,
        validation=Validation(context=context, note=note, stop_flag=stop_flag),
    )


def _observe(observer: TrainingObserver, context: TrainingContext) -> None:
    def begin_step(_: int, batch: Batch | None) -> None:
        if batch is not None:
            observer.batch(context.progress.state.epoch, batch)

    hooks = context.hooks
    hooks.setup.append(lambda components, *_: observer.begin(components.models))
    hooks.begin_step.append(begin_step)
    hooks.before_backward.append(observer.backward)
    hooks.after_evaluation.append(observer.evaluated)


def _context(
    config: TrainConfig,
    run: RunDirectory,
    group: Group,
    console: Console,
    own_options: Sequence[str],
) -> TrainingContext:
    """Make the state and components that engine, hooks and gradient synchronisation share."""
    division = Division.of(config.data.shards, group.world_size)
    components, hooks = Components(), StepHooks()
    step_profiler = StepProfiler(note, group.device, group.world_size, components.named_parameters)
    scaler = LossScaler(group.device.type) if config.compute.precision == "fp16" else None
    shared = shared_between_nodes(run.path, group)
    return TrainingContext(
        config=config,
        group=group,
        division=division,
        components=components,
        hooks=hooks,
        optimizer_step=OptimizerStep(
            scaler=scaler,
            clip_norm=config.optim.clip_norm,
            report=console.warn if group.rank == 0 else _nothing,
            backward_hooks=hooks.before_backward,
            step_profiler=step_profiler,
        ),
        progress=TrainingProgress(
            loop=config.loop,
            snapshot_every_steps=config.snapshots.snapshot_every_steps,
            snapshot_every_s=config.snapshots.every_s,
            log_every_steps=config.metrics.log_every_steps,
        ),
        profiler=Profiler(
            path=run.profile_json,
            step_profiler=step_profiler,
            group=group,
            components=components,
            sync=method_of(config),
        ),
        gpu=GpuMonitor.of(group.device) if is_accelerator(group.device) else None,
        buffer_averager=BufferAverager(
            components, group, division, console.warn if group.rank == 0 else None
        ),
        random=RandomStreams(config.loop.seed, group.rank, group.device),
        run=run,
        console=console,
        scaler=scaler,
        writes=group.rank == 0 if shared else group.placement.local_rank == 0,
        shared=shared,
        kept_options=tuple(own_options),
    )


def make_sync(context: TrainingContext) -> GradientSync:
    """Make the `GradientSync` that the options choose. Collective.

    Raises:
        UsageError: The backend can't carry it.
    """
    method = method_of(context.config)
    refuse_backend(context.config.sync, context.group.backend)
    make: Callable[[TrainingContext], GradientSync] = imported(
        sync_methods()[method].implementation
    )
    return make(context)


def _hooks(context: TrainingContext, sync: GradientSync, opened: ExitStack) -> Iterator[StepHook]:
    """Make the step hooks of this training, in the order in which they are called."""
    config, group, console = context.config, context.group, context.console
    components = context.components
    agree = None if context.shared else group.broadcast_text
    warn = console.warn if group.rank == 0 else _nothing
    # Checks that every training has.
    yield LoopChecks(context, warn)
    yield StreamChecks(warn)
    yield SubsetChecks()
    # The loss scale, and what the gradient synchronisation does after a step.
    if context.scaler is not None:
        yield context.optimizer_step
    if overrides(sync, GradientSync, "after_step"):
        context.hooks.after_step.append(partial(context.profiler.after_step, sync))
    # Checks that options ask for, or promises of bits and equal weights need.
    if config.data.shards is not None:
        allowed = config.compute.allow_different_hardware
        numerics = NumericsRecord(group.device, console.warn, allow_different=allowed)
        yield ReproducibilityChecks(numerics, agree)
    every = check_every(config)
    drift = ReplicaConsistency(group, every, components.named_parameters, components.optimizers)
    if every:
        yield ReplicaChecks(drift)
    elif config.loop.check_every is None:
        yield RareReplicaChecks(drift, warn)
    logger = MetricsLogger(context, agree or str)
    opened.callback(logger.close)
    yield logger


def _nothing(line: str) -> None:
    """Say nothing: another rank does."""
