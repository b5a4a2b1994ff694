"""Builds what a worker trains with, in order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from paceline.checkpoint.store import SnapshotStore
from paceline.distributed.group import Group
from paceline.distributed.shared_storage import shared_between_nodes
from paceline.distributed.work_division import Division
from paceline.gradient_sync.replica_consistency import DriftGuard
from paceline.launch.heartbeat import note
from paceline.launch.watchdog.sidecar import WatchedWorkers, watched
from paceline.metrics.console import Console, make_console
from paceline.metrics.counters import StepCounters
from paceline.results.run_directory import RunDirectory
from paceline.training.batches.load_balancing import SpeedMeter
from paceline.training.components import Parts
from paceline.training.config import TrainConfig
from paceline.training.engine import Engine
from paceline.training.metrics_logger import Recorder
from paceline.training.numerics import NumericsRecord
from paceline.training.observer import WATCHER
from paceline.training.optimizer_step import Stepper
from paceline.training.profiling.profile_writer import Profiler
from paceline.training.profiling.step_profiler import Pace
from paceline.training.progress import Course
from paceline.training.rng import RandomStreams
from paceline.training.session import Session
from paceline.training.signals import StopFlag
from paceline.training.snapshots.manager import SnapshotKeeper, Terms
from paceline.training.step_checks import Guard
from paceline.training.sync.base import GradientSync
from paceline.training.sync.buffer_averaging import Statistics
from paceline.training.sync.context import SyncContext, make_sync
from paceline.training.sync.shard_validation import check_every
from paceline.training.sync.validation import method_of


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
    """Lend a session, and close what it opened: snapshots in flight, reader processes. Collective.

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
    with ExitStack() as opened:
        opened.callback(console.close)
        engine = _build(config, run, group, stop_flag, console, own_options, announce)
        for close in (engine.release, engine.recorder.close, engine.keeper.close):
            opened.callback(close)
        with _watched(config, run, group):
            yield Session(engine, given, unseeded=unseeded)


def _watched(config: TrainConfig, run: RunDirectory, group: Group) -> AbstractContextManager[None]:
    """Have the worker watched from outside where it is one of several and no launcher of ours is
    there to do it."""
    limits, place = config.hang_limits(), group.placement
    if limits is None or place.source == "alone" or group.world_size == 1:
        return nullcontext()
    party = WatchedWorkers(
        log_dir=run.logs,
        rank=group.rank,
        workers=place.local_world_size,
        world_size=group.world_size,
        node=place.node_rank,
        attempt=place.attempt,
        limits=limits,
    )
    return watched(note, party, starts=place.local_rank == 0)


def _build(
    config: TrainConfig,
    run: RunDirectory,
    group: Group,
    stop_flag: StopFlag,
    console: Console,
    own_options: Sequence[str],
    announce: Callable[[Engine], None],
) -> Engine:
    division, parts = Division.of(config.data.shards, group.world_size), Parts()
    counters = StepCounters(top=None, parts=division.parts_of(group.rank))
    numerics = _numerics(config, group, console)
    shared = shared_between_nodes(run.path, group)
    scaler = _make_scaler(config, group)
    stepper = _make_stepper(config, group, console, parts, scaler)
    context = SyncContext(
        config=config,
        group=group,
        division=division,
        parts=parts,
        stepper=stepper,
        course=_make_course(config),
        profiler=_make_profiler(config, run, group, parts, stepper),
        statistics=Statistics(parts, group, division),
        random=RandomStreams(config.loop.seed, group.rank, group.device),
        run=run,
        console=console,
        scaler=scaler,
        writes=group.rank == 0 if shared else group.placement.local_rank == 0,
        kept_options=tuple(own_options),
    )
    sync = make_sync(context)
    context.profiler.wire_bytes = sync.wire_bytes
    return Engine(
        config=config,
        run=run,
        group=group,
        course=context.course,
        parts=parts,
        stepper=stepper,
        profiler=context.profiler,
        counters=counters,
        keeper=_make_keeper(context, sync, counters, numerics, shared=shared),
        recorder=_make_recorder(config, run, group, console, shared=shared),
        console=console,
        stop_flag=stop_flag,
        note=note,
        meter=SpeedMeter(group.device) if config.data.balance and group.world_size > 1 else None,
        random=context.random,
        guard=_guard(config, group, parts, numerics),
        division=division,
        sync=sync,
        watcher=stepper.watcher,
        announce=announce,
    )


def _make_keeper(
    context: SyncContext,
    sync: GradientSync,
    counters: StepCounters,
    numerics: NumericsRecord | None,
    *,
    shared: bool,
) -> SnapshotKeeper:
    config = context.config
    return SnapshotKeeper(
        store=SnapshotStore(context.run.snapshots, config.snapshots.keep_last),
        group=context.group,
        parts=context.parts,
        counters=counters,
        scaler=context.scaler,
        statistics=context.statistics,
        sync=sync,
        terms=Terms(
            report=context.console.warn,
            division=context.division,
            own_options=context.kept_options,
            writes=context.writes,
            shared=shared,
            method=method_of(config),
            numerics=numerics,
        ),
    )


def _make_stepper(
    config: TrainConfig,
    group: Group,
    console: Console,
    parts: Parts,
    scaler: torch.amp.GradScaler | None,
) -> Stepper:
    return Stepper(
        scaler=scaler,
        clip_norm=config.optim.clip_norm,
        report=console.warn if group.rank == 0 else _nothing,
        watcher=WATCHER.get(),
        pace=Pace(note, group.device, group.world_size, parts.named_parameters),
    )


def _make_profiler(
    config: TrainConfig, run: RunDirectory, group: Group, parts: Parts, stepper: Stepper
) -> Profiler:
    return Profiler(
        path=run.profile_json, pace=stepper.pace, group=group, parts=parts, sync=method_of(config)
    )


def _make_scaler(config: TrainConfig, group: Group) -> torch.amp.GradScaler | None:
    fp16 = config.compute.precision == "fp16"
    return torch.amp.GradScaler(group.device.type) if fp16 else None


def _make_course(config: TrainConfig) -> Course:
    return Course(
        loop=config.loop,
        snapshot_every_steps=config.snapshots.snapshot_every_steps,
        snapshot_every_s=config.snapshots.every_s,
    )


def _numerics(config: TrainConfig, group: Group, console: Console) -> NumericsRecord | None:
    if config.data.shards is None:
        return None
    allowed = config.compute.allow_different_hardware
    return NumericsRecord(group.device, console.warn, allow_different=allowed)


def _guard(
    config: TrainConfig, group: Group, parts: Parts, numerics: NumericsRecord | None
) -> Guard | None:
    every = check_every(config)
    if not every and numerics is None:
        return None
    drift = DriftGuard(group, every, parts.named_parameters, parts.optimizers)
    return Guard(drift, parts, numerics)


def _nothing(line: str) -> None:
    """Say nothing: another rank does."""


def _make_recorder(
    config: TrainConfig, run: RunDirectory, group: Group, console: Console, *, shared: bool
) -> Recorder:
    agree = str if shared else group.broadcast_text
    if group.rank != 0:
        return Recorder(None, None, console, agree)
    events = run.path / "tensorboard" if config.metrics.tensorboard else None
    return Recorder(run.metrics_csv, events, console, agree)
