"""`run.json` and `summary.json`: what a training was, and how it ended. Rank 0 writes."""

import json
import platform
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version

import torch
from torch import nn

from paceline._version import __version__
from paceline.config.files import write_json
from paceline.config.rundir import RunDirectory
from paceline.dist.device import cpu_name, describe_device
from paceline.dist.group import Group
from paceline.launch.placement import usable_cores
from paceline.optim.options import describe_optimizer
from paceline.optim.rate import scaled_lr
from paceline.trainer.request import TrainRequest
from paceline.trainer.session import Session

_LIBRARIES = ("torch", "torchvision", "numpy", "safetensors", "pytorch-optimizer")


def describe_run(session: Session, request: TrainRequest) -> dict[str, object]:
    """Describe a training as it starts: settings, what follows from them, versions, hosts.

    Collective: every worker tells about its host; the result is the same on each.
    """
    settings = session.config.settings()
    return {
        "format": 1,
        "paceline": __version__,
        "recipe": request.recipe,
        "reference": request.reference,
        "recipe_arguments": dict(request.arguments),
        "settings": {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()},
        "given": list(request.given),
        "derived": _derived(session),
        "versions": {"python": platform.python_version(), "paceline": __version__}
        | {name: version(name) for name in _LIBRARIES},
        "hosts": _hosts(session.group),
        "command": list(request.command),
        "started_at": request.started_at,
    }


def write_run(run: RunDirectory, description: Mapping[str, object], start: object) -> None:
    """Write `run.json`, keeping the history of earlier starts.

    Args:
        run: The run directory.
        description: What `describe_run` gave.
        start: This start, one entry of the history.
    """
    before = run.read_run() if run.run_json.exists() else {}
    history = before.get("history", [])
    earlier = history if isinstance(history, list) else []
    first = before.get("started_at", description["started_at"])
    record = {**description, "started_at": first, "history": [*earlier, start]}
    write_json(run.run_json, record)


def describe_start(session: Session, attempt: int, resumed: bool) -> dict[str, object]:
    """Describe one start of the training for the history."""
    reason = "restart" if attempt else "resume" if resumed else "start"
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "world_size": session.group.world_size,
        "from_step": session.state.step,
        "from_epoch": session.state.epoch,
        "reason": reason,
    }


def summarize(session: Session, recipe: str) -> dict[str, object]:
    """Say how the training ended. Collective: the weights' hash needs every worker."""
    state, plan, group = session.state, session.plan, session.group
    return {
        "recipe": recipe,
        "world_size": group.world_size,
        "nodes": group.placement.nodes,
        "shards": group.world_size,
        "global_batch": plan.global_batch,
        "epochs": state.epoch,
        "steps": state.step,
        "samples_seen": state.samples_seen,
        "train_time_s": round(state.elapsed_s, 3),
        "images_per_s": round(state.samples_seen / state.train_s, 1) if state.train_s else None,
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        "val_accuracy": state.val_accuracy,
        "val_top5_accuracy": state.val_top5_accuracy,
        "best_val_accuracy": state.best_val_accuracy,
        "best_val_loss": state.best_val_loss,
        "best_epoch": state.best_epoch,
        "val_samples": session.val_source.num_samples,
        "stopped_because": state.ended or session.stopping,
        "weights_sha256": session.keeper.fingerprint(),
        "snapshots_written": session.keeper.written,
        "snapshots_skipped": session.keeper.skipped,
        "restarts": group.placement.attempt,
    }


def opening_lines(session: Session, description: Mapping[str, object], run: RunDirectory) -> str:
    """Say at the start what was chosen, for the user."""
    derived = description["derived"]
    assert isinstance(derived, dict)
    plan, device = session.plan, session.group.device
    workers = _plural(plan.world_size, "worker")
    batch = f"global batch {plan.global_batch}"
    if plan.world_size > 1:
        batch += f" = {' + '.join(map(str, _shortened(plan.batch_per_worker)))}"
    if plan.micro_batches > 1:
        batch += f", in {plan.micro_batches} micro-batches"
    threads = _plural(int(derived["threads"]), "thread")
    lines = [
        f"Paceline {__version__}: {description['recipe']} on {workers} "
        f"({describe_device(device)}, {derived['backend']}, {threads} each)",
        f"  model     {type(session.model).__name__}, {derived['parameters']:,} parameters, "
        f"{derived['precision']}, {derived['memory_format']}",
        f"  data      {session.train_source.describe()}; "
        f"{session.val_source.num_samples:,} for validation",
        f"  batch     {batch}; {plan.steps_per_epoch} steps an epoch",
        f"  optimizer {derived['optimizer']}",
        f"  rate      {derived['lr_rule']}, {session.config.optim.schedule} schedule",
        f"  run       {run.path}",
    ]
    if session.state.step:
        lines.append(f"  from      {_position(session)}")
    return "\n".join(lines)


def restart_line(session: Session) -> str:
    """Say after a restart where the training goes on."""
    return f"All {session.group.world_size} workers are back, from {_position(session)}"


def parameter_count(model: nn.Module) -> int:
    """Count a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _position(session: Session) -> str:
    state = session.state
    steps = session.plan.steps_per_epoch
    return (
        f"step {state.step}: epoch {state.epoch + 1}, {state.step_in_epoch} of {steps} steps done"
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _shortened(batches: tuple[int, ...]) -> list[object]:
    return list(batches) if len(batches) <= 8 else [*batches[:3], "...", batches[-1]]


def _derived(session: Session) -> dict[str, object]:
    config, plan, group = session.config, session.plan, session.group
    lr, rule = scaled_lr(config.optim, plan.global_batch)
    return {
        "world_size": plan.world_size,
        "nodes": group.placement.nodes,
        "shards": plan.world_size,
        "global_batch": plan.global_batch,
        "batch_per_worker": list(plan.batch_per_worker),
        "micro_batches": plan.micro_batches,
        "lr": lr,
        "lr_rule": rule,
        "memory_format": "channels-last" if session.channels_last else "contiguous",
        "precision": config.compute.precision,
        "device": describe_device(group.device),
        "backend": group.backend,
        "threads": torch.get_num_threads(),
        "steps_per_epoch": plan.steps_per_epoch,
        "train_samples": plan.train_samples,
        "val_samples": session.val_source.num_samples,
        "parameters": parameter_count(session.model),
        "model": type(session.model).__name__,
        "optimizer": describe_optimizer(config.optim),
    }


def _hosts(group: Group) -> list[dict[str, object]]:
    own = {
        "host": socket.gethostname(),
        "device": describe_device(group.device),
        "cpu": cpu_name(),
        "cores": usable_cores(),
    }
    hosts: dict[str, dict[str, object]] = {}
    for rank, text in enumerate(group.gather_texts(json.dumps(own, sort_keys=True))):
        host = hosts.setdefault(text, {**json.loads(text), "ranks": []})
        ranks = host["ranks"]
        assert isinstance(ranks, list)
        ranks.append(rank)
    return list(hosts.values())
