"""`--dry-run` of a training that no cluster is to start: what would start, and how large it is."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.errors import DataError, ExitCode, JobError, PacelineError, UsageError
from paceline.options.command_line import note
from paceline.options.fields import OptionValue
from paceline.options.figures import plural, show_bytes
from paceline.options.text import fitting, printable
from paceline.runtime.spec import Launch
from paceline.training.config import TrainConfig
from paceline.training.recipe import load_recipe

if TYPE_CHECKING:
    from torch import nn

    from paceline.training.job import Job

_NOTHING_FETCHED: Mapping[str, tuple[OptionValue, OptionValue]] = {
    "download": (True, False),
    "weights": ("imagenet", "none"),
}
"""Arguments of the built-in recipes that may fetch something: that value, and one that doesn't."""
_OF_SCRIPT = "the script makes it: steps and memory aren't known before"


def show_plan(launch: Launch) -> int:
    """Print what would start. Returns the exit code.

    The recipe's job is built, so its data is read, but nothing is fetched, made or started.

    Raises:
        UsageError: It couldn't start: the run directory is in use, say.
        JobError: Likewise: its data is missing, say.
    """
    if launch.is_new:
        launch.run.check_new()
    workers = _workers(launch)
    # Data and memory are known where the job can be built without fetching anything.
    job, why = _job(launch)
    lines = [("job", why)]
    if job is not None:
        lines = [
            ("recipe", launch.request.recipe),
            ("data", _steps(job, launch.config, workers)),
            ("memory", _memory(job.model, launch.config)),
        ]
    lines += [("workers", _place(launch, workers)), ("run", _run(launch))]
    for name, text in lines:
        print(fitting(printable(f"  {name:7}  {text}"), sys.stdout))
    print("Nothing has been started.")
    return ExitCode.DONE


def _job(launch: Launch) -> "tuple[Job | None, str]":
    """Build the job, or say why it can't be without starting the training."""
    if launch.request.kind == "script":
        return None, _OF_SCRIPT
    given = launch.request.arguments
    arguments = dict(given)
    for name, (fetches, instead) in _NOTHING_FETCHED.items():
        if arguments.get(name) == fetches:
            arguments[name] = instead
    try:
        return load_recipe(launch.request.reference)(**arguments), ""
    except PacelineError as error:
        lacks_data = isinstance(error, DataError)
        fetched = lacks_data and arguments.get("download") != given.get("download")
        if not fetched and launch.place.hosts is None:  # else the hosts may have it
            kind = UsageError if isinstance(error, UsageError) else JobError
            raise kind(f"the training couldn't start: {error}") from error
        why = ", as a dry run fetches nothing" if fetched else ""
        return None, f"can't be built yet{why}; steps and memory aren't known: {error}"


def _workers(launch: Launch) -> int:
    """Count all workers; 0 where each host will choose its own number."""
    place = launch.place
    if place.hosts is not None:
        slots = [host.slots for host in place.hosts.read()]
        return sum(count or 0 for count in slots) if all(slots) else 0
    return place.workers * (1 if place.node is None else place.node.nodes)


def _steps(job: "Job", config: TrainConfig, workers: int) -> str:
    from paceline.distributed.work_division import Division
    from paceline.training.batches.plan import describe_oversized, make_plan
    from paceline.training.batches.sources import describe_data

    source = describe_data(job.train)
    samples = source.num_samples()
    division = Division.of(config.data.shards, workers or 1)
    plan = make_plan(config.data, division, samples)
    if oversized := describe_oversized(plan):
        note(oversized)
    total = plan.steps_per_epoch * config.loop.epochs
    return (
        f"{samples:,} {source.unit}, {plural(plan.steps_per_epoch, 'step')} an epoch of "
        f"{plan.global_batch:,} {source.unit} each; {plural(config.loop.epochs, 'epoch')}: "
        f"{plural(total, 'step')}"
    )


def _memory(model: "nn.Module", config: TrainConfig) -> str:
    weights, gradients, state = training_bytes(model, config)
    return (
        f"{show_bytes(weights + gradients + state)} on each worker: weights {show_bytes(weights)}, "
        f"gradients {show_bytes(gradients)}, {config.optim.optimizer}'s state {show_bytes(state)}; "
        "activations and buffers for communication come on top"
    )


def training_bytes(model: "nn.Module", config: TrainConfig) -> tuple[int, int, int]:
    """Count the bytes of weights (with buffers), gradients and the optimizer's state.

    The optimizer takes a step on the meta device, which computes shapes alone.

    Args:
        model: Is moved there, and can't be used any more.
    """
    import torch

    from paceline.optim.build import build_optimizer

    # On the meta device nothing is allocated. One step has the optimizer create its state.
    model = model.to("meta")
    parameters = list(model.parameters())
    optimizer = build_optimizer(config.optim, model.named_parameters(), config.optim.lr)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [v for each in optimizer.state.values() for v in each.values()]
    return (
        sum(tensor.nbytes for tensor in (*parameters, *model.buffers())),
        sum(parameter.nbytes for parameter in trained),
        sum(value.nbytes for value in state if isinstance(value, torch.Tensor)),
    )


def _place(launch: Launch, workers: int) -> str:
    place = launch.place
    if place.hosts is not None:
        names = [host.name for host in place.hosts.read()]
        count = str(workers) if workers else "as many as each host has GPUs or cores for,"
        return f"{count} on {', '.join(names)}, reached by ssh"
    if place.here:
        return f"this process is number {place.rank} of {place.workers}, started already"
    of_all = f" of {workers}" if workers > place.workers else ""
    return f"{place.workers}{of_all} on this machine, {plural(place.threads, 'thread')} each"


def _run(launch: Launch) -> str:
    if launch.is_new:
        return f"{launch.run.path}, which would be made"
    step = max(0, launch.run.newest_step())
    return f"{launch.run.path}, from step {step:,}"
