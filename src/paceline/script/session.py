"""`paceline.session()`: a script becomes a worker of a training, alone or one of many."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, Unpack, cast

import torch.distributed as dist
from torch import nn

from paceline.distributed.environment import (
    detect_launchers,
    launcher_request,
    read_environment,
    store_file,
)
from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.errors import InterruptedTraining, JobError, PacelineError, UsageError
from paceline.launch.errors.error_records import describe, record
from paceline.options.fields import OptionValue
from paceline.options.shell import command_line
from paceline.results.run_directory import RunDirectory
from paceline.runtime.copying import copied
from paceline.runtime.outcome import announce_end
from paceline.runtime.run_dir_agreement import make_on_this_node
from paceline.runtime.script_options import from_environment, settled
from paceline.runtime.spec import started_by
from paceline.runtime.tracking import tracked
from paceline.runtime.write_report import write_report_apart
from paceline.script.ending import RunDirectoryNamed, check_no_other, opened
from paceline.script.pinning import pin_from_start
from paceline.script.settings import SessionSettings
from paceline.tracking.registry import require_trackers
from paceline.training.config import TrainConfig, TrainRequest
from paceline.training.engine import Engine
from paceline.training.hooks.observer import OBSERVER
from paceline.training.rng import has_drawn_unseeded, seed_everything
from paceline.training.run_record.previous_run import PreviousRun
from paceline.training.session import Session
from paceline.training.setup import open_session
from paceline.training.sync.validation import refuse_idle
from paceline.training.worker import announce, finish, joined_as_worker

Resume = bool | Literal["auto"]
_OF_STARTER = {
    "copy_to": "copies",
    "tracker": "feeds the trackers",
    "tracker_project": "feeds the trackers",
}
"""Options of what the process does that started the workers."""
_NO_BATCH_LEFT = (
    "The training was stopped behind the last batch of this epoch, and has been resumed there: the "
    "loop over batches had nothing left to do. Give names that only its body sets a value before "
    "it, such as loss = None"
)
_NOTHING_TO_UNWRAP = "A model of the session stays the module that it was: leave out .module"
_OWN_GROUP = (
    "The session makes the process group, averages gradients and ends the group: leave out "
    "init_process_group, DistributedDataParallel and destroy_process_group"
)
_AS_BEFORE = "In a notebook_launcher give those of the run, or start again in another run_dir"
_Make = Callable[[RunDirectory, Placement], RunDirectory]
"""Makes the run directory, or finds the old one."""


def session(
    run_dir: str | Path | None = None,
    *,
    resume: Resume = False,
    **settings: Unpack[SessionSettings],
) -> Session:
    """Become a worker of a training from here on. Collective.

    The same script runs as one plain process and as many, under `paceline run`, torchrun, srun or
    mpirun. The session ends with the script, with a `with` block or by `close()`; then the summary
    and the report are written.

    Args:
        run_dir: What the training leaves behind; must be new or empty unless it resumes. By default
            runs/SCRIPT-TIME. Under `paceline run` without `--run-dir`, the workers are started
            again in it: what stands before this call runs twice.
        resume: Go on with the training in `run_dir`, exactly where it stopped; `"auto"` begins anew
            where there is none.
        settings: Options of training by their Python names, such as `precision="bf16"`,
            `snapshot_every="10m"`, `time_budget="2h"`. See `paceline run --help`.

    Raises:
        UsageError: An unknown option, one that the command line contradicts, or a run directory
            that can't be used.
        InterruptedTraining: A signal ended the training, which is saved: the process's exit code
            will be 75.
    """
    is_alone = launcher_request() is None
    check_no_other(own_run_dir=is_alone)
    request = _request(run_dir, resume, cast(Mapping[str, OptionValue], settings))
    config = TrainConfig.from_settings(request.settings)
    # Before anything is opened: this may replace the process.
    pin_from_start(config, sys._getframe(1))
    make = None
    if is_alone:
        make = partial(_make, resume=resume, is_named=run_dir is not None)
    context = _opened(request, config, make)
    return opened(context, ends_with_process=is_alone)


@contextmanager
def _opened(request: TrainRequest, config: TrainConfig, make: _Make | None) -> Iterator[Session]:
    refuse_idle(config, request.given)
    require_trackers(config.metrics.tracker)
    with ExitStack() as stack:
        # What rank 0 alone does at the end comes after the group's: nobody waits for its copies.
        closing = ExitStack()
        flag, group = stack.enter_context(joined_as_worker(request, config, closing))
        # Settle the run directory together; under a launcher it is settled already.
        named = RunDirectory.named(request.run_dir)
        run = replace(named, shared=config.metrics.share_run_dir)
        if make is not None:
            run = _agree_on_run(run, make, group)
            closing.enter_context(_closing(run, group.rank, config))
        request = replace(request, run_dir=str(run.path))
        # Seed. Random numbers that the script has drawn before can't be reproduced: noted first.
        unseeded = has_drawn_unseeded()
        seed_everything(config.loop.seed)
        opened = open_session(
            config,
            run,
            group,
            flag,
            given=frozenset(request.given),
            announce=partial(_announce, request=request),
            unseeded=unseeded,
        )
        # Train: the script runs within the yield.
        s = stack.enter_context(opened)
        try:
            yield s
            if group.world_size > 1 and not dist.is_initialized():
                raise UsageError(f"the script has ended the process group. {_OWN_GROUP}")
        except InterruptedTraining:
            finish(s.engine, request)
            raise
        except SystemExit as error:
            if error.code in (None, 0):
                raise JobError(
                    f"the script ended itself by sys.exit({error.code!r}) before the end of the "
                    "training; to stop early, leave the loop by `break` on all workers"
                ) from error
            raise
        except Exception as error:
            if advice := _advice_for(error, s.engine):
                error.add_note(advice)
            record(describe(error, group.rank), run.logs)
            raise
        # The script has come to its end.
        if s.engine.begun:
            # A generator that a variable holds isn't closed by `break`.
            s.engine.context.script.has_left |= s.is_in_loop
            s.engine.close_epoch()  # the script left its last one by `break`
            finish(s.engine, request)


def _advice_for(error: Exception, engine: Engine) -> str | None:
    """Say what helps against an error of the script that follows from the session. Local."""
    if isinstance(error, NameError) and engine.has_an_epochs_end_alone:
        return _NO_BATCH_LEFT
    if isinstance(error, AttributeError) and error.name == "module":
        return _NOTHING_TO_UNWRAP if isinstance(error.obj, nn.Module) else None
    is_torchs = isinstance(error, AssertionError | ValueError) and not isinstance(
        error, PacelineError
    )
    return _OWN_GROUP if is_torchs and "process group" in str(error).lower() else None


def _announce(engine: Engine, request: TrainRequest) -> None:
    """Compare the script's settings with those of the run that it goes on with. Collective.

    Raises:
        UsageError: They would change what is trained; every worker says so.
    """
    context = engine.context
    problem = ""
    # Rank 0 compares; its verdict is broadcast, so that all workers raise or none does.
    if context.group.rank == 0 and context.run.run_json.exists():
        plan = context.progress.plan
        batch = {"global_batch": plan.global_batch if plan else None, "batch_per_worker": None}
        try:
            PreviousRun.read(context.run).changed(
                context.config.settings() | batch,
                request.allowed,
                way_on=partial(_allowing, context.run),
            )
        except UsageError as error:
            problem = str(error)
    problem = context.group.broadcast_text(problem)
    if problem:
        raise UsageError(problem)
    announce(engine, request)


def _request(
    run_dir: str | Path | None, resume: Resume, settings: Mapping[str, OptionValue]
) -> TrainRequest:
    """Merge the settings of the script, the command line and the environment.

    Raises:
        RunDirectoryNamed: The script names the run directory, and the launcher has made one up.
    """
    # Under `paceline run` the launcher has settled the request; the script's settings are added.
    payload = launcher_request()
    if payload is not None:
        request = TrainRequest.from_json(payload)
        own = RunDirectory.named(run_dir) if run_dir is not None else None
        watched = OBSERVER.get() is not None  # it trains elsewhere, and keeps nothing
        if own is not None and not watched and str(own.path) != request.run_dir:
            if request.run_dir_yields:
                raise RunDirectoryNamed(str(own.path), resume=resume)
            raise UsageError(
                f"the script says run_dir={str(run_dir)!r}, and it was started with the run "
                f"directory {request.run_dir}: leave it out in the script, or give the same one "
                "with --run-dir"
            )
        for name, does in _OF_STARTER.items():
            if settings.get(name) not in (None, request.settings.get(name)):
                raise UsageError(
                    f"the script says {name}=..., and what started it {does}: give it "
                    f"--{name.replace('_', '-')} there"
                )
        return replace(request, settings=settled(settings, request.settings))
    # Started by something else, or alone: the request is made here.
    given = from_environment()
    script = Path(sys.argv[0] or "session")
    _, moment = _started()
    chosen = settled(settings, given)
    name = str(chosen.get("name") or script.stem)
    run = RunDirectory.named(run_dir) if run_dir else RunDirectory.usual(name, moment)
    return TrainRequest(
        kind="script",
        recipe=script.name,
        reference=str(script.absolute()),
        arguments={},
        script_args=tuple(sys.argv[1:]),
        settings=chosen,
        given=tuple(given),
        run_dir=str(run.path),
        command=("python", *sys.argv),
        started_at=moment.isoformat(timespec="seconds"),
    )


def _started() -> tuple[str, datetime]:
    """Say what has started the workers, and may start them again after a failure, and when."""
    if not detect_launchers(read_environment()).started:
        return "", datetime.now(UTC)
    return started_by()


def _agree_on_run(run: RunDirectory, make: _Make, group: Group) -> RunDirectory:
    """Have rank 0 make the run directory, and every other worker take its name over. Collective.

    Raises:
        UsageError: It can't be used; every worker says so.
    """
    problem = ""
    if group.rank == 0:
        try:
            run = make(run, group.placement)
        except UsageError as error:
            problem = str(error).replace("--run-dir", "run_dir=...")
            problem = problem.replace(command_line("resume", run.path), _way_on(run))
    answer = json.loads(group.broadcast_text(json.dumps([str(run.path), problem])))
    if answer[1]:
        raise UsageError(answer[1])
    agreed = RunDirectory.named(answer[0])
    make_on_this_node(replace(agreed, shared=run.shared))
    return agreed


def _make(
    run: RunDirectory, placement: Placement, *, resume: Resume, is_named: bool
) -> RunDirectory:
    """Make the run directory, or find the old one.

    Raises:
        UsageError: There is none to resume, or it can't be made.
    """
    again = placement.attempt > 0
    if not is_named and resume is not True:
        run = run.claim(_started()[0], again=again)
    if run.run_json.exists() and (resume or again):
        return run
    if resume is True:
        raise UsageError(f"there is no training in {run.path} to resume")
    run.create()
    return run


def _is_launched() -> bool:
    """Return whether `paceline.notebook_launcher` has started this worker."""
    return launcher_request() is None and bool(store_file(read_environment()))


def _way_on(run: RunDirectory) -> str:
    """Say what resumes a training that no command of Paceline's has started."""
    if _is_launched():
        return f"paceline.session(run_dir={str(run.path)!r}, resume=True)"
    return command_line("resume", run.path)


def _allowing(run: RunDirectory, options: str) -> str:
    """Say how to resume with settings that these options would allow to differ."""
    if _is_launched():
        return _AS_BEFORE
    # Without a launcher there is no command line yet where they could be given.
    command = f"{command_line('resume', run.path)} " if launcher_request() is None else ""
    return f"To resume with them all the same: {command}{options}"


@contextmanager
def _closing(run: RunDirectory, rank: int, config: TrainConfig) -> Iterator[None]:
    """Hold the run directory on rank 0, have it copied and tracked, and tell how it all ended."""
    if rank != 0:
        yield
        return
    copies = copied(run, config.snapshots, is_new=not run.run_json.exists())
    with run.lock(), copies, tracked(run, config.metrics):
        run.remove_summary()
        try:
            yield
        # Interrupted, failed, or finished: each ends in its own words and with its exit code.
        except InterruptedTraining:
            announce_end(run, interrupted=True, write=write_report_apart, way_on=_way_on(run))
            raise
        except Exception:
            if any(run.snapshots.glob("step-*")):
                print(f"Resume from the newest good snapshot: {_way_on(run)}", file=sys.stderr)
            elif not run.run_json.exists():
                run.discard()
            raise
        if run.summary_json.exists():
            announce_end(run, interrupted=False, write=write_report_apart)
        elif not run.run_json.exists():
            run.discard()  # nothing was trained, now or earlier
