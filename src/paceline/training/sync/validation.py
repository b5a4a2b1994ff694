"""Chooses the gradient synchronisation, and checks which options go with it and `--shards`.

Imports no torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from paceline.distributed.options import FEW_OPERATIONS
from paceline.distributed.work_division import Division
from paceline.errors import UsageError
from paceline.gradient_sync.options import OWN_OPTIONS, SyncMethod, SyncOptions
from paceline.gradient_sync.registry import sync_methods
from paceline.options.fields import OptionValue
from paceline.training.config import TrainConfig

CHECK_EVERY = 100
"""Steps between two comparisons of the workers' weights in reproducible mode, by default."""
_STREAM_WARMUP_STEPS = 100
"""Steps of warm-up where an epoch has no known length."""
_DEFAULTS: Mapping[str, OptionValue] = dict(vars(SyncOptions()))


def method_of(config: TrainConfig) -> SyncMethod:
    """Name the `--sync` method that the options choose."""
    if config.sync.sync is not None:
        return config.sync.sync
    return "allreduce" if config.data.shards is None else "ordered"


def check_method(config: TrainConfig) -> None:
    """Refuse what doesn't go together with the way of combining gradients. Pure.

    Raises:
        UsageError: Two options contradict, or one has no effect.
    """
    method = method_of(config)
    entry = sync_methods()[method]
    if config.data.shards is not None and not entry.needs_shards:
        raise UsageError(
            f"--shards can't be combined with --sync {method}: the same bits on any number of "
            "workers need gradients that are summed in full, in one order. Leave one of the two out"
        )
    if entry.needs_shards and config.data.shards is None:
        raise UsageError(
            f"--sync {method} needs --shards V: gradients are summed in the order of V fixed shards"
        )
    for name, value in _settings(config.sync).items():
        if value != _DEFAULTS[name] and name not in entry.options:
            raise _without_effect(name, method)
    refuse_backend(method, config.dist.backend)
    if entry.own_weights:
        _check_own_weights(config, method)


def check_reproducible(config: TrainConfig, world_size: int) -> None:
    """Refuse options with which the same bits can't be promised. Pure.

    Args:
        config: The options.
        world_size: Number of workers.

    Raises:
        UsageError: One of them is given together with `--shards`, or there are too many workers.
    """
    shards = config.data.shards
    if shards is None:
        if config.compute.allow_different_hardware:
            raise UsageError(
                "--allow-different-hardware goes with --shards: without it nothing is compared"
            )
        return
    Division.of(shards, world_size)  # refuses too many workers
    if config.compute.sync_batchnorm:
        raise UsageError(
            "--shards can't be combined with --sync-batchnorm: its statistics need all shards of a "
            "batch at once, and a worker goes through its shards one after another. Leave it out "
            "(each shard has statistics of its own), or use a model with GroupNorm"
        )
    if config.loop.time_budget is not None:
        raise UsageError(
            "--shards can't be combined with --time-budget: the schedule would follow the clock, "
            "and with it the result. Give --epochs (--time-budget none where a recipe sets one)"
        )
    if config.compute.compile == "auto":
        raise UsageError(
            "--shards can't be combined with --compile auto: what is compiled would follow the "
            "clock, and with it the bits. Give --compile or --no-compile"
        )
    if config.compute.cudnn_benchmark:
        raise UsageError(
            "--shards can't be combined with --cudnn-benchmark: kernels would follow the clock, "
            "and with them the bits. Leave it out"
        )
    if config.dist.backend in FEW_OPERATIONS:
        raise UsageError(
            f"--shards needs all-to-all, which --backend {config.dist.backend} doesn't have. Use "
            "--backend nccl or gloo"
        )


def check_every(config: TrainConfig) -> int:
    """Give the steps between two comparisons of the workers' weights; 0 for never."""
    if config.loop.check_every is not None:
        return config.loop.check_every
    return 0 if config.data.shards is None else CHECK_EVERY


def has_alike_weights(config: TrainConfig) -> bool:
    """Tell whether weights are equal on all workers, so that they can be compared by default.

    Not where a way of combining may be chosen that leaves each worker its own.
    """
    method = method_of(config)
    may_be_apart = method == "auto" or sync_methods()[method].own_weights
    return config.loop.check_every is None and not may_be_apart


def refuse_idle(config: TrainConfig, given: Collection[str]) -> None:
    """Refuse options that were given and have no effect with the others. Pure.

    A value that is the default's as well is no effect either: whoever gives it expects one.

    Args:
        config: The options as they are settled.
        given: Names of those that the command line or the environment gave.

    Raises:
        UsageError: There is such an option.
    """
    method, settings = method_of(config), config.settings()
    effective = [name for name in given if settings.get(name) is not None]
    owned = {name for names in OWN_OPTIONS.values() for name in names}
    # Options of another method.
    for name in effective:
        if name in owned and name not in OWN_OPTIONS.get(method, ()):
            raise _without_effect(name, method)
    # Options that only matter together with another one.
    if "patience" in effective and config.loop.target_accuracy is None:
        raise UsageError(
            "--target-epochs has no effect without --target-accuracy: it says how many epochs in a "
            "row must meet it. To stop when nothing improves, give --early-stopping"
        )
    if "allow_different_hardware" in effective and config.data.shards is None:
        raise UsageError(
            "--allow-different-hardware has no effect without --shards: other hardware is refused "
            "with --shards alone"
        )


def _without_effect(name: str, method: SyncMethod) -> UsageError:
    return UsageError(
        f"--{name.replace('_', '-')} has no effect with --sync {method}: it goes with "
        f"--sync {' or '.join(_owners(name))}"
    )


def refuse_backend(method: SyncMethod, backend: str) -> None:
    """Refuse a way of combining gradients that a backend can't carry. Pure.

    Raises:
        UsageError: It lacks half precision.
    """
    if backend in FEW_OPERATIONS and sync_methods()[method].sends_half:
        raise UsageError(
            f"--sync {method} can't be combined with --backend {backend}, which carries no half "
            "precision. Use --sync allreduce, powersgd or local, or --backend nccl or gloo"
        )


def may_choose(config: TrainConfig, method: SyncMethod) -> bool:
    """Tell whether a method can be combined with the other options, for `--sync auto`. Pure."""
    try:
        check_method(replace(config, sync=replace(config.sync, sync=method)))
    except UsageError:
        return False
    return True


def warmup_steps(config: TrainConfig, steps_per_epoch: int | None) -> int:
    """Say for how many steps gradients are averaged in full first. Pure."""
    given = config.sync.sync_warmup_steps
    return (steps_per_epoch or _STREAM_WARMUP_STEPS) if given is None else given


def describe_method(config: TrainConfig) -> str:
    """Describe the `--sync` method, such as `powersgd of rank 4`. Pure."""
    return describe_options(replace(config.sync, sync=method_of(config)))


def describe_options(options: SyncOptions) -> str:
    """Say what these come to. Pure."""
    entry = sync_methods()[options.sync or "allreduce"]
    said = entry.label.format(**{**vars(options), "sync": options.sync or "allreduce"})
    if "sync_every" not in entry.options:
        return said
    parts = f" in {options.sync_parts} parts" if options.sync_parts > 1 else ""
    outer = f", outer learning rate {options.outer_lr:g} and momentum {options.outer_momentum:g}"
    return (
        f"{said}, averaged every {options.sync_every} steps{parts} in {options.sync_precision}, "
        f"{options.delay} steps late{outer if 'outer_lr' in entry.options else ''}"
    )


def _check_own_weights(config: TrainConfig, method: SyncMethod) -> None:
    """Refuse what needs workers that are alike, or that talk, in every step."""
    if config.loop.check_every:
        raise UsageError(
            f"--check-every compares the workers' weights, and with --sync {method} each worker "
            "has its own between two averages. Leave one of the two out"
        )
    if config.loop.ema is not None:
        raise UsageError(
            f"--ema (s.ema) averages over the steps of one training, and with --sync {method} each "
            "worker has weights of its own between two averages. Leave one of the two out"
        )
    if config.compute.sync_batchnorm:
        raise UsageError(
            f"--sync-batchnorm exchanges statistics in every step, which --sync {method} is there "
            "to avoid. Leave one of the two out, or use a model with GroupNorm"
        )
    few, precision = config.dist.backend in FEW_OPERATIONS, config.sync.sync_precision
    if few and precision != "fp32":
        raise UsageError(
            f"--sync-precision {precision} can't be combined with --backend "
            f"{config.dist.backend}, which has no all-to-all. Use --sync-precision fp32, or "
            "--backend nccl or gloo"
        )


def _settings(options: SyncOptions) -> dict[str, OptionValue]:
    return {n: v for n, v in vars(options).items() if n != "sync"}


def _owners(name: str) -> list[str]:
    return [method for method, names in OWN_OPTIONS.items() if name in names]
