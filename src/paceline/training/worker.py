"""The main function of a worker process: set-up, training, final snapshot and summary."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from socket import gethostname
from time import perf_counter

import torch

from paceline.distributed.allocator import keep_freed_memory
from paceline.distributed.cpu_threads import bind_near_gpu, share_cores
from paceline.distributed.device import pick_device, resolve_backend
from paceline.distributed.environment import current_placement
from paceline.distributed.group import Group, joined
from paceline.errors import InterruptedTraining, StorageError
from paceline.files import storing, write_json
from paceline.launch.errors.error_records import describe, record
from paceline.optim.table import OPTIMIZER_OPTIONS
from paceline.results.run_directory import RunDirectory
from paceline.training.batches.loader import Loader
from paceline.training.batches.plan import describe_oversized, describe_unlike_shares
from paceline.training.config import TrainConfig, TrainRequest
from paceline.training.engine import Engine
from paceline.training.job import Job
from paceline.training.loop import train
from paceline.training.recipe import load_recipe
from paceline.training.recipe_session import evaluate_best, prepare
from paceline.training.rng import seed_everything
from paceline.training.run_record.numerics import choose_kernels, has_mixed, pin
from paceline.training.run_record.numerics import describe as describe_numerics
from paceline.training.run_record.run_metadata import (
    describe_run,
    describe_start,
    opening_lines,
    restart_line,
    summarize,
    unseeded_line,
    write_run,
)
from paceline.training.run_record.startup_facts import facts_of
from paceline.training.session import Session
from paceline.training.setup import open_session
from paceline.training.status_exchange import StopFlag, stop_on_signals
from paceline.training.sync.validation import check_method, check_reproducible, method_of

LAST_SNAPSHOT_S = 30.0
"""For the last snapshot to be written, where the disk is full or can't be written at first."""


_OWN_HANDLERS = (
    "the script handles {names} itself, in the session's place: unless its handlers call the "
    "session's, nothing is saved then, and workers that leave their loops by it do so at different "
    "steps. The session saves, and ends with exit code 75: leave the handlers out, or set them "
    "before paceline.session()"
)


def run_training(payload: str) -> str:
    """Train, from the newest snapshot in the run directory if there is one. Collective.

    Returns:
        JSON with `stopped_because`.
    """
    request = TrainRequest.from_json(payload)
    config = TrainConfig.from_settings(request.settings)
    run = RunDirectory.named(request.run_dir)
    with joined_as_worker(request, config) as (flag, group):
        # Seeds come first: the recipe may draw random numbers already.
        seed_everything(config.loop.seed)
        job = load_recipe(request.reference)(**request.arguments)
        # Train on a session; it closes what it has opened, also after an error.
        opened = open_session(
            config,
            run,
            group,
            flag,
            own_options=tuple(OPTIMIZER_OPTIONS),
            announce=partial(announce, request=request),
        )
        with opened as session:
            try:
                return _train(session, job, request)
            except Exception as error:
                # Before what is open gets closed, which takes time that may not be given.
                record(describe(error, group.rank), run.logs)
                raise


@contextmanager
def joined_as_worker(
    request: TrainRequest,
    config: TrainConfig,
    between: AbstractContextManager[object] | None = None,
) -> Iterator[tuple[StopFlag, Group]]:
    """Join the other workers, with device and threads set up; signals are handled meanwhile.

    Collective.

    Args:
        between: Entered before the group is joined, and left after it has ended.

    Raises:
        UsageError: Options that don't go together, or that this machine can't have.
    """
    # Which worker this is, on which device, and whether the options go together.
    placement = current_placement(config.dist)
    device = pick_device(config.dist, placement)
    backend = resolve_backend(config.dist, device)
    check_reproducible(config, placement.world_size)
    check_method(config)
    set_up_torch(config)
    # Join the process group, which compares the facts that must be equal on all workers.
    facts = facts_here(request, config, device, backend)
    timeout_s = config.dist.timeout_s
    with (
        stop_on_signals(under_launcher=placement.has_launcher) as flag,
        between or nullcontext(),
        joined(placement, device, backend, timeout_s, config.dist, facts) as group,
    ):
        bind_near_gpu(group, config.launch.numa_affinity)
        if config.launch.threads is None and config.data.shards is None:
            share_cores(group)
        yield flag, group


def _train(session: Session, job: Job, request: TrainRequest) -> str:
    training = prepare(session, job)
    with suppress(InterruptedTraining):  # saved; the summary says why
        train(training)
    return finish(session.engine, request, partial(evaluate_best, training))


def set_up_torch(config: TrainConfig) -> None:
    """Set what is global in a worker: threads, memory, which kernels it takes."""
    keep_freed_memory()
    is_pinned = config.data.shards is not None
    if is_pinned:
        pin(config.launch.threads)
    elif config.launch.threads is not None:
        torch.set_num_threads(config.launch.threads)
    choose_kernels(config.compute, pinned=is_pinned)


def facts_here(
    request: TrainRequest, config: TrainConfig, device: torch.device, backend: str
) -> dict[str, str]:
    """List what has to be the same on all workers; with `--shards` what bits depend on as well."""
    exact = config.data.shards is not None and not config.compute.allow_different_hardware
    return facts_of(
        request,
        config.settings() | {"sync": method_of(config)},
        device=device.type,
        backend=backend,
        numerics=describe_numerics(device) if exact else None,
    )


def announce(engine: Engine, request: TrainRequest) -> None:
    """Write `run.json` and say what begins. Collective."""
    context = engine.context
    description = describe_run(engine, request)
    run, attempt = context.run, context.group.placement.attempt
    start = describe_start(engine, attempt, resumed=run.run_json.exists())
    # Rank 0 writes and shows; the description above is collective.
    if context.group.rank == 0:
        with storing(run.run_json):
            write_run(run, description, start)
        opening = restart_line(engine) if attempt else opening_lines(engine, description, run)
        context.console.say(opening)
        plan = context.progress.plan
        if plan is not None and (oversized := describe_oversized(plan)):
            context.console.warn(oversized)
        loaders = [each for each in context.components.loaders if isinstance(each, Loader)]
        if unlike := describe_unlike_shares([loader.plan for loader in loaders]):
            context.console.warn(unlike)
        if context.components.unseeded and not context.progress.state.step:
            context.console.warn(unseeded_line(context.components.unseeded))
        if replaced := engine.stop_flag.replaced:
            context.console.warn(_OWN_HANDLERS.format(names=", ".join(replaced)))


def finish(
    engine: Engine,
    request: TrainRequest,
    evaluate: Callable[[], Mapping[str, object]] = dict,
) -> str:
    """Wait for the snapshots and write `summary.json`. Collective.

    Args:
        evaluate: Gives what else belongs into the summary; called where the training wasn't cut
            short.

    Raises:
        StorageError: The final weights, or the summary, can't be written; on every worker.
    """
    context = engine.context
    # Everything that is still under way: hooks, the last snapshot, the profile.
    for end_training in context.hooks.end_training:
        end_training(context.progress.state.step)
    save_last(engine)
    context.profiler.record(context.progress, must=True)
    summary = summarize(engine, request.recipe)
    # Evaluate the final model, unless a signal asks for a quick end; its time is reported.
    budget, begun_s = (
        context.progress.describe_budget(context.progress.lap()),
        perf_counter(),
    )
    if summary["stopped_because"] != "signal":
        summary |= evaluate()
    if budget is not None:
        test_s = perf_counter() - begun_s
        used_s = budget["used_s"] + test_s
        summary["time_budget"] = budget | {"used_s": used_s, "test_s": test_s}
    if context.group.rank == 0:
        mixed = (
            has_mixed(context.run, context.progress.state.step)
            if context.division.is_fixed
            else None
        )
        with storing(context.run.summary_json):
            write_json(context.run.summary_json, summary | {"mixed_numerics": mixed})
    return json.dumps({"stopped_because": summary["stopped_because"]})


def save_last(engine: Engine) -> None:
    """Wait until every node's last snapshot is on its disk. Collective.

    Where one can't be written it is tried again for LAST_SNAPSHOT_S, or until a signal comes.

    Raises:
        StorageError: It couldn't be written, at the end of a training that no signal stopped, or
            the run directory is gone; on every worker.
    """
    context = engine.context
    progress, flag = context.progress, engine.stop_flag
    # After a signal the process may be killed soon: no second try.
    was_stopped = progress.stopping == "signal" and progress.state.ended is None
    limit_s = 0.0 if was_stopped else min(LAST_SNAPSHOT_S, context.config.dist.timeout_s / 2)
    engine.note.operation = "snapshot"
    reason = engine.snapshots.save_last(limit_s, lambda: flag.name is not None)
    is_gone = context.group.rank == 0 and not context.run.run_json.exists()
    # All workers hear of all failures, so that all raise the same error.
    own = json.dumps([gethostname(), reason, is_gone])
    reports = [json.loads(text) for text in context.group.gather_texts(own)]
    if any(gone for _, _, gone in reports):
        raise StorageError(
            f"{context.run.run_json} is gone: the run directory was removed, moved or emptied "
            "while the training ran. Where it was moved, move it back and resume; what is there "
            "now can't be resumed"
        )
    failed = {host: why for host, why, _ in reports if why}
    if failed and not was_stopped:
        each = "; ".join(f"on {host}, {why}" for host, why in failed.items())
        raise StorageError(
            f"the training came to its end, but its final weights, of step {progress.state.step}, "
            f"are in no snapshot: {each}. It was tried again for {limit_s:.0f} s. Make room there, "
            "or make it writable, and resume: what comes after the newest snapshot is trained again"
        )
