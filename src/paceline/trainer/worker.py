"""A worker from its first line to its last: what the launcher runs in every process."""

import json

import torch

from paceline.config.files import write_json
from paceline.config.rundir import RunDirectory
from paceline.dist.allocator import keep_freed_memory
from paceline.dist.device import pick_device, resolve_backend
from paceline.dist.environment import current_placement
from paceline.dist.group import joined
from paceline.errors import JobError
from paceline.launch.boundary import describe, record
from paceline.trainer.config import TrainConfig
from paceline.trainer.job import Job
from paceline.trainer.loop import train
from paceline.trainer.recipe import load_recipe
from paceline.trainer.records import (
    describe_run,
    describe_start,
    opening_lines,
    restart_line,
    summarize,
    write_run,
)
from paceline.trainer.request import TrainRequest
from paceline.trainer.seeding import seed_everything
from paceline.trainer.session import Session
from paceline.trainer.setup import open_session
from paceline.trainer.signals import stop_on_signals


def run_training(payload: str) -> str:
    """Train, from the newest snapshot in the run directory if there is one. Collective.

    Args:
        payload: A `TrainRequest` as JSON.

    Returns:
        JSON with `stopped_because`.
    """
    request = TrainRequest.from_json(payload)
    config = TrainConfig.from_settings(request.settings)
    placement = current_placement()
    device = pick_device(config.dist, placement)
    backend = resolve_backend(config.dist, device)
    set_up_torch(config)
    run = RunDirectory.named(request.run_dir)
    timeout_s = config.dist.timeout_s
    with (
        stop_on_signals(under_launcher=placement.source != "alone") as flag,
        joined(placement, device, backend, timeout_s) as group,
    ):
        seed_everything(config.loop.seed)
        job: object = load_recipe(request.reference)(**request.arguments)
        if not isinstance(job, Job):
            raise JobError(
                f"the recipe {request.recipe} gave a {type(job).__name__}; "
                "its function must return a paceline.Job"
            )
        with open_session(job, config, run, group, flag) as session:
            _announce(session, request, run)
            try:
                train(session)
            except Exception as error:
                # Before what is open gets closed, which takes time that may not be given.
                record(describe(error, placement.rank), run.logs)
                raise
            return _finish(session, request, run)


def set_up_torch(config: TrainConfig) -> None:
    """Set what is global in a worker: threads, memory, kernels that give the same every time."""
    keep_freed_memory()
    if config.launch.threads is not None:
        torch.set_num_threads(config.launch.threads)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def _announce(session: Session, request: TrainRequest, run: RunDirectory) -> None:
    description = describe_run(session, request)
    if session.group.rank == 0:
        attempt, resumed = session.group.placement.attempt, run.run_json.exists()
        write_run(run, description, describe_start(session, attempt, resumed))
        opening = restart_line(session) if attempt else opening_lines(session, description, run)
        session.console.say(opening)


def _finish(session: Session, request: TrainRequest, run: RunDirectory) -> str:
    session.keeper.flush()
    summary = summarize(session, request.recipe)
    if session.group.rank == 0:
        write_json(run.summary_json, summary)
    return json.dumps({"stopped_because": summary["stopped_because"]})
