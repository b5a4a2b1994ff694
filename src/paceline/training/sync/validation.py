"""Chooses the gradient synchronisation, and checks which options go with it and `--shards`.

Imports no torch.
"""

from collections.abc import Collection, Mapping

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
    refuse_backend(config.sync, config.dist.backend)


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
    if config.compute.times_kernels:
        raise UsageError(
            f"--shards can't be combined with --compile-mode {config.compute.compile_mode}: "
            "kernels would follow the clock, and with them the bits. Leave it out"
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
            "--patience has no effect without --target-accuracy: it says how many epochs in a "
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


def refuse_backend(options: SyncOptions, backend: str) -> None:
    """Check that a backend can carry what gradients travel in. Pure.

    Raises:
        UsageError: It lacks half precision.
    """
    if backend in FEW_OPERATIONS and options.sync_precision != "fp32":
        raise UsageError(
            f"--sync-precision {options.sync_precision} can't be combined with --backend "
            f"{backend}, which carries no half precision. Leave it out, use --sync powersgd, or "
            "--backend nccl or gloo"
        )


def warmup_steps(config: TrainConfig, steps_per_epoch: int | None) -> int:
    """Say for how many steps gradients are averaged in full first. Pure."""
    given = config.sync.sync_warmup_steps
    return (steps_per_epoch or _STREAM_WARMUP_STEPS) if given is None else given


def describe_method(config: TrainConfig) -> str:
    """Describe the `--sync` method, such as `powersgd of rank 4`. Pure."""
    options, method = config.sync, method_of(config)
    described = sync_methods()[method].label.format(**{**vars(options), "sync": method})
    return described if options.sync_precision == "fp32" else f"{described} in bf16"


def _settings(options: SyncOptions) -> dict[str, OptionValue]:
    return {n: v for n, v in vars(options).items() if n != "sync"}


def _owners(name: str) -> list[str]:
    return [method for method, names in OWN_OPTIONS.items() if name in names]
