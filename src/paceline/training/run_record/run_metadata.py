"""`run.json` and `summary.json`: what a training was, and how it ended. Rank 0 writes."""

import json
import platform
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

import torch
from torch import nn

from paceline._version import __version__
from paceline.distributed.cpu_threads import describe_cores
from paceline.distributed.device import cpu_name, describe_device, features, has_bf16
from paceline.distributed.group import Group
from paceline.files import write_json
from paceline.launch.worker_count import usable_cores
from paceline.optim.options import describe_optimizer
from paceline.optim.schedule import scaled_lr
from paceline.options.figures import show_short_percent
from paceline.results.run_directory import RUN_FORMAT, RunDirectory
from paceline.training.batches.plan import TrainPlan
from paceline.training.components import cuts_at_buckets
from paceline.training.config import TrainRequest
from paceline.training.engine import Engine
from paceline.training.hooks.observer import OBSERVER
from paceline.training.options import LoopOptions
from paceline.training.profiling.gpu_monitor import peak_memory
from paceline.training.run_record.numerics import describe, describe_kernels, numerics_of_all
from paceline.training.run_record.revision import find_revision
from paceline.training.snapshots.train_state import finite
from paceline.training.sync.validation import describe_method, method_of

_LIBRARIES = ("torch", "torchvision", "numpy", "safetensors", "pytorch-optimizer")


def describe_run(engine: Engine, request: TrainRequest) -> dict[str, object]:
    """Describe a training as it starts: settings, what follows from them, versions, hosts.

    Collective: every worker tells about its host. The result is the same on each, but for the
    commit, which rank 0 alone looks up.
    """
    context = engine.context
    settings = context.config.settings()
    return {
        "format": RUN_FORMAT,
        "paceline": __version__,
        "kind": request.kind,
        "recipe": request.recipe,
        "reference": request.reference,
        "recipe_arguments": dict(request.arguments),
        "script_args": list(request.script_args),
        "settings": {n: list(v) if isinstance(v, tuple) else v for n, v in settings.items()},
        "given": list(request.given),
        "derived": _derived(engine),
        "versions": {"python": platform.python_version(), "paceline": __version__}
        | {name: version(name) for name in _LIBRARIES},
        "numerics": describe(context.group.device),
        "git": _revision(request, context.group),
        "hosts": _hosts(context.group),
        "placement": _placement(context.group),
        "command": list(request.command),
        "started_at": request.started_at,
    }


def _revision(request: TrainRequest, group: Group) -> dict[str, object] | None:
    """Say which commit the training's code is of; asked once, by rank 0, which writes it."""
    if group.rank != 0 or OBSERVER.get():  # watched by `verify`: no program, nothing is kept
        return None
    return find_revision(request.reference)


def write_run(run: RunDirectory, description: Mapping[str, object], start: object) -> None:
    """Write `run.json`, keeping the history of earlier starts."""
    before = run.read_run() if run.run_json.exists() else {}
    history = before.get("history", [])
    earlier = history if isinstance(history, list) else []
    first = before.get("started_at", description["started_at"])
    record = {**description, "started_at": first, "history": [*earlier, start]}
    write_json(run.run_json, record)


def describe_start(engine: Engine, attempt: int, resumed: bool) -> dict[str, object]:
    """Describe one start of the training for the history. Collective."""
    context = engine.context
    reason = "restart" if attempt else "resume" if resumed else "start"
    start: dict[str, object] = {
        "started_at": datetime.now(UTC).isoformat(timespec="microseconds"),
        "world_size": context.group.world_size,
        "from_step": context.progress.state.step,
        "from_epoch": context.progress.state.epoch,
        "reason": reason,
    }
    if context.division.is_fixed:
        most = context.config.data.max_batch_per_worker
        start["numerics"] = numerics_of_all(context.group, most)
    return start


def summarize(engine: Engine, recipe: str) -> dict[str, object]:
    """Say how the training ended. Collective: the weights' hash needs every worker."""
    context = engine.context
    state, plan, group = (
        context.progress.state,
        context.progress.plan,
        context.group,
    )
    counted = state.train_s and state.samples_seen
    images_per_s = round(state.samples_seen / state.train_s, 1) if counted else None
    return {
        "recipe": recipe,
        "world_size": group.world_size,
        "nodes": group.placement.nodes,
        "shards": context.division.parts,
        "sync": method_of(context.config),
        "global_batch": plan.global_batch if plan else None,
        "epochs": state.epoch,
        "steps": state.step,
        "samples_seen": state.samples_seen,
        "train_time_s": round(state.elapsed_s, 3),
        "images_per_s": images_per_s,
        **_communication(engine),
        "train_loss": state.train_loss,
        "val_loss": state.val_loss,
        "val_accuracy": state.val_accuracy,
        "val_top5_accuracy": state.val_top5_accuracy,
        "best_val_accuracy": state.best_val_accuracy,
        "best_val_loss": state.best_val_loss,
        "best_epoch": state.best_epoch,
        "val_samples": context.progress.val_samples,
        "evaluated_weights": "model" if context.components.average is None else "ema",
        "figures": {name: finite(value) for name, value in engine.figures.items()},
        "stopped_because": state.ended or context.progress.stopping,
        "weights_sha256": engine.snapshots.fingerprint(),
        "state_sha256": engine.snapshots.state_fingerprint(),
        "final_snapshot": engine.snapshots.snapshot_of(state.step),
        "peak_gpu_memory_bytes": _peak_gpu_memory(group),
        "snapshots_written": engine.snapshots.written,
        "snapshots_skipped": engine.snapshots.skipped,
        "restarts": group.placement.attempt,
    }


def _peak_gpu_memory(group: Group) -> list[int] | None:
    """List the most that tensors took of each worker's GPU, by rank. Collective."""
    peak = peak_memory(group.device)
    if peak is None:
        return None
    own = torch.tensor([peak])
    return [int(row) for row in group.gather_rows(own)[:, 0]]


def _communication(engine: Engine) -> dict[str, object]:
    """Say what all steps of this start spent on communication."""
    spent = engine.context.profiler.total()
    return {
        "exposed_comm": round(spent.exposed, 4) if spent else None,
        "waiting": round(spent.waiting, 4) if spent else None,
        "wire_bytes_per_step": round(spent.wire_bytes, 1) if spent else None,
    }


def opening_lines(engine: Engine, description: Mapping[str, object], run: RunDirectory) -> str:
    """Say at the start what was chosen, for the user."""
    context = engine.context
    derived = description["derived"]
    assert isinstance(derived, dict)
    group = context.group
    # What every training has.
    lines = [
        f"Paceline {__version__}: {description['recipe']} on {_plural(group.world_size, 'worker')} "
        f"({describe_device(group.device)}, {derived['backend']}, "
        f"{_plural(int(derived['threads']), 'thread')} each)",
        f"  model     {derived['model']}, {derived['parameters']:,} parameters, "
        f"{derived['precision']}, {derived['memory_format']}",
        *_data_lines(engine),
        f"  optimizer {derived['optimizer']}",
    ]
    # What only some have: options that were given, or that this hardware offers.
    lines += _kernels_line(engine)
    if cores := describe_cores(group.device):
        lines.append(f"  cores     {cores}" + (" (rank 0)" if group.world_size > 1 else ""))
    if context.progress.rate is not None:
        schedule = context.config.optim.schedule
        rule = str(derived["lr_rule"]).removeprefix("lr ")
        lines.append(f"  lr        {rule}, {schedule} schedule")
    if context.config.loop.ema is not None:
        lines.append(f"  ema       decay {context.config.loop.ema:g}, evaluated and exported")
    lines += _target_line(context.config.loop)
    if derived["sync"] not in ("allreduce", "ordered"):
        lines.append(f"  sync      {derived['sync']}")
    lines += _compile_line(engine)
    # Where the run is kept, and the step it goes on from.
    each = "" if context.shared else " here; each other node keeps its own"
    lines.append(f"  run       {run.path}{each}")
    if context.progress.state.step:
        lines.append(f"  from      {_position(engine)}")
    return "\n".join(lines)


def _target_line(loop: LoopOptions) -> list[str]:
    """Say which accuracy ends the training; empty where none does."""
    if loop.target_accuracy is None:
        return []
    epochs = f" in {loop.patience} epochs in a row" if loop.patience > 1 else ""
    target = show_short_percent(loop.target_accuracy)
    return [f"  target    ends at {target} validation accuracy{epochs}"]


def _kernels_line(engine: Engine) -> list[str]:
    """Say what was chosen on a GPU, and what would be faster. Empty on CPUs."""
    context = engine.context
    group, exact = context.group, context.division.is_fixed
    kernels = describe_kernels(group.device)
    if not kernels:
        return []
    first_groups = [optimizer.param_groups[0] for optimizer in context.components.optimizers]
    kernels += ", fused optimizer" if any(first.get("fused") for first in first_groups) else ""
    faster = []
    if context.config.compute.precision == "fp32" and not exact and has_bf16(group.device):
        faster.append("--precision bf16")
    # A script's own, for which nobody has chosen; those that we build have `foreach` set.
    if not exact and features(group.device).has_fused and any(map(_could_be_fused, first_groups)):
        faster.append("fused=True in the optimizer")
    tip = f"; faster: {', '.join(faster)}" if faster else ""
    return [f"  kernels   {kernels}{tip}"]


def _compile_line(engine: Engine) -> list[str]:
    """Say whether models are compiled; empty where nobody asks for it."""
    context, options = engine.context, engine.context.config.compute
    if not options.compile:
        return []
    cuts = cuts_at_buckets(options, context.group, exact=context.division.is_fixed)
    mode = options.compile_mode or "on"
    return [f"  compile   {mode}" + (", cut where buckets of gradients end" if cuts else "")]


def _could_be_fused(first: Mapping[str, object]) -> bool:
    """Tell whether an optimizer has a fused kernel, and its first group no choice. Pure."""
    return first.get("fused", True) is None and first.get("foreach", True) is None


def unseeded_line(names: Sequence[str]) -> str:
    """Warn that the first weights of these models can't be had again. Pure."""
    listed = ", ".join(names)
    return (
        f"The first weights of {listed} were drawn without a seed, before the session: this run "
        "can't be repeated (all workers take rank 0's weights). Call torch.manual_seed(...) before "
        "the model is built, or build it after paceline.session()"
    )


def _data_lines(engine: Engine) -> list[str]:
    context = engine.context
    plan, loader = context.progress.plan, context.components.train_loader
    if plan is None or loader is None:
        return []
    data = loader.source.describe()
    if context.progress.val_samples:
        data += f"; {context.progress.val_samples:,} for validation"
    return [f"  data      {data}", f"  batch     {describe_batch(plan)}"]


def describe_batch(plan: TrainPlan) -> str:
    """Say how a batch is cut, such as `global batch 64 = 2 x 32; 23 steps an epoch`. Pure."""
    batch, division = f"global batch {plan.global_batch:,}", plan.division
    if division.is_fixed:
        batch += f" in {_shard_sizes(plan.global_batch, division.parts)}"
    elif division.world_size > 1:
        batch += f" = {_worker_sizes(plan.batch_per_worker)}"
    if plan.micro_batches > 1:
        each = "each " if division.is_fixed else ""
        batch += f", {each}in {plan.micro_batches} micro-batches"
    if division.is_fixed and division.parts > 1:
        batch += f", the same bits on 1 to {division.parts} workers"
    if plan.steps_per_epoch:
        batch += f"; {_plural(plan.steps_per_epoch, 'step')} an epoch"
    return batch


def _shard_sizes(global_batch: int, shards: int) -> str:
    least, rest = divmod(global_batch, shards)
    return f"{_plural(shards, 'shard')} of {least:,}" + (f" or {least + 1:,}" if rest else "")


def restart_line(engine: Engine) -> str:
    """Say after a restart where the training resumes."""
    return f"All {engine.context.group.world_size} workers are back, from {_position(engine)}"


def parameter_count(model: nn.Module) -> int:
    """Count a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def _position(engine: Engine) -> str:
    context = engine.context
    state, steps = context.progress.state, context.progress.steps_per_epoch
    planned = context.config.loop.epochs
    if steps and state.epoch >= planned:
        return f"step {state.step}: all {_plural(planned, 'epoch')} done"
    of = f" of {steps} steps" if steps else " steps"
    return f"step {state.step}: epoch {state.epoch + 1}, {state.step_in_epoch}{of} done"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _worker_sizes(batches: tuple[int, ...]) -> str:
    """Write the workers' shares, such as `2 x 32 per worker` or `22 + 21 + 21`."""
    if len(set(batches)) == 1:
        return f"{len(batches)} x {batches[0]:,} per worker"
    shown = [f"{size:,}" for size in batches]
    shown = shown if len(shown) <= 8 else [*shown[:3], "...", shown[-1]]
    return " + ".join(shown)


def _derived(engine: Engine) -> dict[str, object]:
    context = engine.context
    config, group, model = context.config, context.group, context.components.model
    return {
        "world_size": group.world_size,
        "nodes": group.placement.nodes,
        "shards": context.division.parts,
        **_planned(engine),
        "memory_format": "channels-last" if _is_channels_last(model) else "contiguous",
        "precision": config.compute.precision,
        "device": describe_device(group.device),
        "backend": group.backend,
        "sync": describe_method(config),
        "threads": torch.get_num_threads(),
        "snapshots_written": "once" if context.shared else "once on each node",
        "val_samples": context.progress.val_samples,
        "parameters": parameter_count(model),
        "unseeded_models": list(context.components.unseeded),
        "model": ", ".join(type(model).__name__ for model in context.components.models.values()),
    }


def _is_channels_last(model: nn.Module) -> bool:
    """Return whether any of a model's convolutions has its weights in channels-last."""
    layout = torch.channels_last
    images = (weight for weight in model.parameters() if weight.dim() == 4)
    return any(w.is_contiguous(memory_format=layout) and not w.is_contiguous() for w in images)


def _planned(engine: Engine) -> dict[str, object]:
    """List what follows from the plan and the optimizer's options, or from the script's own."""
    context = engine.context
    plan, config = context.progress.plan, context.config
    found: dict[str, object] = {"global_batch": None}
    if plan is not None:
        found = {
            "global_batch": plan.global_batch,
            "batch_per_worker": list(plan.batch_per_worker),
            "micro_batches": plan.micro_batches,
            "steps_per_epoch": plan.steps_per_epoch,
            "train_samples": plan.train_samples,
            "sample_unit": context.unit,
        }
    # A recipe's optimizer follows from the options, a script's is read from the object itself.
    if plan is not None and context.progress.rate is not None:
        lr, rule = scaled_lr(config.optim, plan.global_batch)
        return found | {"lr": lr, "lr_rule": rule, "optimizer": describe_optimizer(config.optim)}
    optimizers = context.components.optimizers
    rates = [float(o.param_groups[0]["lr"]) for o in optimizers]
    names = [f"{type(o).__name__} (lr {lr:g})" for o, lr in zip(optimizers, rates, strict=True)]
    return found | {
        "lr": rates[0] if rates else None,
        "lr_rule": "the script's own",
        "optimizer": ", ".join(names) or "none",
    }


def _placement(group: Group) -> dict[str, object]:
    """Describe how the workers found each other and where each of them is. Collective.

    Returns:
        The same on every worker: `source` (who said which worker is which), `init_method` (where
        they met; None for one worker), `backend`, `nodes`, and `workers`, one entry per rank with
        `rank`, `local_rank`, `node_rank`, `host`, `interface`, `address`, `chosen_by`, `device`.
    """
    placement, route = group.placement, group.route
    own = {
        "rank": group.rank,
        "local_rank": placement.local_rank,
        "node_rank": placement.node_rank,
        "host": socket.gethostname(),
        "interface": route.interface if route else None,
        "address": route.address if route else None,
        "chosen_by": route.chosen_by if route else None,
        "device": f"{group.device}: {describe_device(group.device)}",
    }
    return {
        "source": placement.source,
        "init_method": str(group.address) if group.address else None,
        "backend": group.backend,
        "nodes": placement.nodes,
        "workers": [json.loads(text) for text in group.gather_texts(json.dumps(own))],
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
