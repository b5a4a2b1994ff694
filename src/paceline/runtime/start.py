"""Starts the workers of a training, waits for them, and says how it ended."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from paceline.distributed.environment import set_variables, thread_variables
from paceline.errors import ExitCode, UsageError
from paceline.launch.errors.error_records import describe
from paceline.launch.signals import signals_raised
from paceline.metrics.tensorboard import require_tensorboard
from paceline.results.run_directory import RunDirectory
from paceline.runtime.copying import copied_by, owner
from paceline.runtime.outcome import announce, announce_end, announce_failure, note_apart
from paceline.runtime.run_dir_agreement import (
    agree_on_run,
    find_run,
    make_run,
    wait_for,
    with_run,
)
from paceline.runtime.spec import PRELOAD, Launch
from paceline.runtime.start_node import start_on_node
from paceline.runtime.start_ssh import start_on_hosts
from paceline.runtime.tracking import tracked
from paceline.runtime.write_report import write_report_apart
from paceline.tracking.registry import require_trackers


def start(launch: Launch) -> int:
    """Run a training to its end. Returns the exit code.

    Raises:
        UsageError: Something that can be checked by now is missing or in the way.
        InfrastructureError: The workers could not be started.
    """
    run = replace(launch.run, shared=launch.config.metrics.share_run_dir)
    launch = replace(launch, run=run)
    if launch.config.metrics.tensorboard:
        require_tensorboard()
    require_trackers(launch.config.metrics.tracker)
    if launch.place.hosts is not None:
        return start_on_hosts(launch, launch.place.hosts)
    if launch.place.node is not None:
        return start_on_node(launch, launch.place.node)
    return _start_here(launch) if launch.place.here else _start_local(launch)


def _start_local(launch: Launch) -> int:
    from paceline.launch.local import forkserver
    from paceline.launch.local.launcher import launch_local

    # Make and own the run directory before anything slow.
    launch = make_run(launch)
    run, place = launch.run, launch.place
    yields = launch.request.kind == "script" and launch.is_new and not launch.is_named
    tracks = tracked(run, launch.config.metrics, quiet=launch.quiet)
    with run.lock(), run.swept(), copied_by(launch), tracks:
        run.remove_summary()
        try:
            with signals_raised():  # until the launch catches them itself
                # The fork server imports torch while the launcher starts.
                forkserver.prepare(PRELOAD, place.threads)
                outcome = launch_local(
                    launch.entry,
                    replace(launch.request, run_dir_yields=yields).to_json(),
                    workers=place.workers,
                    threads=place.threads,
                    policy=launch.config.policy(),
                    log_dir=run.logs,
                    progress=run.newest_step,
                )
        except KeyboardInterrupt:
            return announce_end(run, interrupted=True)
        named = json.loads(next(iter(outcome.results.values()), "{}"))
        if "run_dir" not in named or outcome.failures or outcome.interrupted:
            return announce(run, outcome, quiet=launch.quiet)
        run.discard()
    # The script names its run directory: start again in it.
    own = RunDirectory(Path(named["run_dir"]))
    if named["resume"] is True and not own.run_json.exists():
        raise UsageError(f"there is no training in {own.path} to resume")
    is_new = not (named["resume"] and own.run_json.exists())
    return start(replace(with_run(launch, own), is_named=True, is_new=is_new))


def _start_here(launch: Launch) -> int:
    # Rank 0 owns the directory, and tells how the training ended.
    with ExitStack() as owned:
        own = owner(owned)
        # Agree on a run directory: over the store, or else by the node's first worker making it.
        if launch.place.started_apart:
            launch = agree_on_run(launch, own)
        elif launch.place.local_rank == 0:
            launch = make_run(launch)
        elif (found := find_run(launch)) is not None:
            launch = found
        else:
            return ExitCode.USAGE  # the first worker says why
        run, place = launch.run, launch.place
        wait_for(run.logs, lambda: run.logs.is_dir() or None)
        if place.rank == 0:
            if not place.started_apart:
                own(launch)
            run.remove_summary()
            owned.enter_context(tracked(run, launch.config.metrics, quiet=launch.quiet))
        try:
            result = _work_here(launch)
        except Exception as error:  # noqa: BLE001  # the process boundary: reported and recorded
            failure = describe(error, place.rank)
            return announce_failure(run, [failure], write_report_apart if place.rank == 0 else None)
        # Only a signal leaves something to resume.
        interrupted = json.loads(result)["stopped_because"] == "signal"
        if place.rank == 0:
            note_apart(run, [result], place.workers)
            return announce_end(
                run, interrupted=interrupted, write=write_report_apart, quiet=launch.quiet
            )
        return ExitCode.RESUMABLE if interrupted else ExitCode.DONE


def _work_here(launch: Launch) -> str:
    """Run as one of the workers. Returns the training's result, as JSON."""
    from paceline.launch.local.worker import run_here

    payload, logs, place = launch.request.to_json(), launch.run.logs, launch.place
    threads = launch.config.worker_threads
    if threads is not None:  # before torch and NumPy are imported, which read it
        set_variables(thread_variables(threads))
    return run_here(
        launch.entry, payload, logs, place.rank, place.attempt, world_size=place.workers
    )
