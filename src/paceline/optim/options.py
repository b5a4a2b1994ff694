"""Options of the optimizer, its learning rate, warm-up, schedule and clipping. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from paceline.errors import UsageError
from paceline.optim.table import (
    OPTIMIZER_OPTIONS,
    OPTIMIZERS,
    OptimizerName,
    optimizers_with,
)
from paceline.options.fields import LARGEST_NUMBER, OptionValue, check_names, flag

LrScaling = Literal["none", "linear", "sqrt"]
ScheduleName = Literal["constant", "step", "cosine", "one-cycle"]

SCHEDULE_DEFAULTS: Mapping[ScheduleName, Mapping[str, int | float]] = {
    "constant": {},
    "step": {"step_epochs": 30, "step_factor": 0.1},
    "cosine": {"final_lr_factor": 0.0},
    "one-cycle": {},
}
"""Schedule -> the options that only it has, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class OptimOptions:
    """How the weights are updated. `None` means the default of the chosen optimizer or schedule;
    a value for something that it doesn't have is an error, never ignored.

    Flat, since each field is an option of the command line and a key of `run.json`.
    """

    optimizer: OptimizerName = "sgd"
    """Optimizer: sgd, adam, adamw and adadelta are PyTorch's, novograd, lars and lamb are
    pytorch-optimizer's. The default is what most image networks are trained with."""

    lr: float = 0.1
    """Learning rate at the base batch, before scaling. 0.1 suits sgd; adam, adamw, novograd and
    lamb usually want about 0.001, adadelta up to 1."""

    lr_scaling: LrScaling = "none"
    """How the learning rate grows with the global batch: none; linear, lr x batch / base batch;
    sqrt, lr x sqrt(batch / base batch). The result is printed."""

    base_batch: int | None = None
    """Global batch, in samples, for which `lr` was chosen; linear and sqrt scaling need it."""

    momentum: float | None = None
    """Momentum of sgd (default 0) and lars (default 0.9)."""

    nesterov: bool | None = None
    """Nesterov's form of momentum, for sgd and lars (default off); needs a momentum above 0."""

    weight_decay: float | None = None
    """Weight decay: default 0.01 for adamw, 0 for the others. It applies to every parameter,
    biases and BatchNorm included, as in PyTorch; only lars leaves out tensors of one dimension,
    which is part of it. Added to the gradient (sgd, adam, adadelta, lars), to the normalised
    gradient (novograd, lamb), or taken from the weights directly (adamw)."""

    betas: tuple[float, float] | None = None
    """Decay rates of the two running averages: default 0.9 and 0.999 for adam, adamw and lamb,
    0.95 and 0.98 for novograd. The older torch_optimizer library has 0.95 and 0 for novograd
    (its norm isn't averaged): give those to repeat a training made with it."""

    rho: float | None = None
    """Decay rate of the running averages of adadelta (default 0.9)."""

    eps: float | None = None
    """Term that keeps the divisor above zero: default 1e-8 for adam, adamw and novograd, 1e-6 for
    adadelta and lamb."""

    grad_averaging: bool | None = None
    """Weigh each new gradient by 1 - beta1 in the running average: default off for novograd, on
    for lamb. With novograd's beta1 of 0.95 it makes steps 20 times smaller: raise `lr` with it."""

    warmup_epochs: float = 0.0
    """Length of the warm-up in epochs (parts of one are allowed); 0 for none. The
    learning rate rises linearly with every step from `warmup_start` x lr to lr. Not together
    with `warmup_steps`."""

    warmup_steps: int = 0
    """Length of the warm-up in steps; 0 for none."""

    warmup_start: float | None = None
    """Factor of the learning rate at the first step of the warm-up, from 0 to 1 (default 0). After
    linear scaling over K workers, 1/K starts at the learning rate of one worker."""

    schedule: ScheduleName = "constant"
    """The learning rate after the warm-up: constant; step, multiplied by --step-factor every
    --step-epochs; cosine, half a cosine down to the end; one-cycle, from lr/25 up to lr over the
    first 30 % of all steps and down to lr/250000 (it brings its own warm-up and leaves the
    momentum alone)."""

    step_epochs: int | None = None
    """Epochs between two drops of the step schedule (default 30), counted from the first epoch of
    the training, warm-up included."""

    step_factor: float | None = None
    """What the step schedule multiplies the learning rate with at each drop (default 0.1)."""

    final_lr_factor: float | None = None
    """Factor of the learning rate that the cosine schedule ends at (default 0)."""

    clip_norm: float | None = None
    """Scale the whole gradient down to this norm when it is longer; off by default. It is the only
    clipping that happens: lamb's own is switched off."""

    fused: bool | None = None
    """Update all weights by one kernel of PyTorch's, which sgd, adam and adamw have: faster, and
    with fp16 without room for a copy of weights and state; the last bits may differ. Default: on
    GPUs without --shards."""

    def __post_init__(self) -> None:
        """Refuse what can't be right before anything starts.

        Raises:
            UsageError: A value is out of range, or an option doesn't go with the others.
        """
        check_names([self.optimizer], OPTIMIZERS, "optimizer")
        check_names([self.lr_scaling], get_args(LrScaling), "lr_scaling")
        check_names([self.schedule], SCHEDULE_DEFAULTS, "schedule")
        _check_ranges(self)
        _check_optimizer(self)
        _check_schedule(self)
        _check_scaling(self)


def optimizer_arguments(options: OptimOptions) -> dict[str, OptionValue]:
    """Resolve the options that the chosen optimizer has: what was given, else its defaults."""
    given = _given(options, OPTIMIZER_OPTIONS)
    return {**OPTIMIZERS[options.optimizer].defaults, **given}


def schedule_arguments(options: OptimOptions) -> dict[str, int | float]:
    """Resolve the options that only the chosen schedule has: what was given, else its defaults."""
    defaults = SCHEDULE_DEFAULTS[options.schedule]
    given: dict[str, int | float | None] = {
        "step_epochs": options.step_epochs,
        "step_factor": options.step_factor,
        "final_lr_factor": options.final_lr_factor,
    }
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}


def describe_optimizer(options: OptimOptions) -> str:
    """Say in one line what updates the weights: `sgd (momentum 0.9, nesterov off, ...)`."""
    parts = [_describe(name, value) for name, value in optimizer_arguments(options).items()]
    if options.clip_norm is not None:
        parts.append(f"clip norm {options.clip_norm:g}")
    return f"{options.optimizer} ({', '.join(parts)})"


def _describe(name: str, value: OptionValue) -> str:
    words = name.replace("_", " ")
    if isinstance(value, bool):
        return f"{words} {'on' if value else 'off'}"
    if isinstance(value, tuple):
        return f"{words} {' and '.join(str(part) for part in value)}"
    return f"{words} {value}"


def _given(options: OptimOptions, names: tuple[str, ...]) -> dict[str, OptionValue]:
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _require(fits: bool, name: str, value: object, expected: str) -> None:
    if not fits:
        raise UsageError(f"{flag(name)} is {value}; expected {expected}")


_INFINITY = LARGEST_NUMBER + 1  # beyond every number that an option can be


def _check_ranges(options: OptimOptions) -> None:
    for name in ("lr", "clip_norm"):
        _check_between(options, name, 0.0, _INFINITY, "a number above 0", above=True)
    for name in ("weight_decay", "eps", "warmup_epochs"):
        _check_between(options, name, 0.0, _INFINITY, "0 or a number above it")
    for name in ("momentum", "rho"):
        _check_between(options, name, 0.0, 1.0, "0 or more, and less than 1")
    for name in ("base_batch", "step_epochs"):
        _check_between(options, name, 1, _INFINITY, "a whole number of at least 1")
    _check_between(options, "warmup_steps", 0, _INFINITY, "a whole number of at least 0")
    _check_between(options, "step_factor", 0.0, _INFINITY, "a number above 0", above=True)
    for name in ("warmup_start", "final_lr_factor"):
        value = getattr(options, name)
        _require(value is None or 0.0 <= value <= 1.0, name, value, "a factor from 0 to 1")
    if options.betas is not None:
        fits = len(options.betas) == 2 and all(0.0 <= beta < 1.0 for beta in options.betas)
        _require(fits, "betas", options.betas, "two numbers, each 0 or more and less than 1")


def _check_between(
    options: OptimOptions, name: str, low: float, end: float, expected: str, *, above: bool = False
) -> None:
    """Require low <= value < end (low < value with `above`); NaN and infinity never fit."""
    value = getattr(options, name)
    if value is not None:
        _require(low <= value < end and not (above and value == low), name, value, expected)


def _check_optimizer(options: OptimOptions) -> None:
    given = _given(options, OPTIMIZER_OPTIONS)
    for name in given:
        if name not in OPTIMIZERS[options.optimizer].defaults:
            having = ", ".join(optimizers_with(name))
            raise UsageError(
                f"{options.optimizer} has no {flag(name)} (given: {given[name]}). "
                f"Optimizers that have it: {having}"
            )
    arguments = optimizer_arguments(options)
    if options.fused and not OPTIMIZERS[options.optimizer].has_fused:
        having = ", ".join(name for name, entry in OPTIMIZERS.items() if entry.has_fused)
        raise UsageError(
            f"{options.optimizer} has no fused kernel: leave --fused out. Optimizers that have "
            f"one: {having}"
        )
    if arguments.get("nesterov") and arguments["momentum"] == 0.0:
        raise UsageError(
            "--nesterov needs a momentum above 0: give --momentum too, for example 0.9, or turn "
            "it off (--no-nesterov)"
        )


def _check_schedule(options: OptimOptions) -> None:
    defaults = SCHEDULE_DEFAULTS[options.schedule]
    # An option of another schedule would be ignored without a word.
    for name in schedule_arguments(options):
        if name not in defaults:
            owner = next(kind for kind, own in SCHEDULE_DEFAULTS.items() if name in own)
            raise UsageError(
                f"the {options.schedule} schedule has no {flag(name)} (given: "
                f"{getattr(options, name)}). It belongs to the {owner} schedule"
            )
    # The warm-up: one length, and only where the schedule takes one.
    warms_up = options.warmup_epochs > 0 or options.warmup_steps > 0
    if options.warmup_epochs > 0 and options.warmup_steps > 0:
        raise UsageError(
            f"--warmup-epochs {options.warmup_epochs:g} and --warmup-steps {options.warmup_steps} "
            "both give the length of the warm-up; keep one of them"
        )
    if options.warmup_start is not None and not warms_up:
        raise UsageError(
            f"--warmup-start {options.warmup_start:g} is given but there is no warm-up; "
            "give --warmup-epochs or --warmup-steps as well"
        )
    if options.schedule == "one-cycle" and warms_up:
        raise UsageError(
            "the one-cycle schedule brings its own warm-up (the first 30 % of all steps); "
            "leave out --warmup-epochs and --warmup-steps, or choose the cosine schedule"
        )


def _check_scaling(options: OptimOptions) -> None:
    if options.lr_scaling == "none" and options.base_batch is not None:
        raise UsageError(
            f"--base-batch {options.base_batch} is given but --lr-scaling is none; "
            "give --lr-scaling linear or sqrt, or leave out --base-batch"
        )
    if options.lr_scaling != "none" and options.base_batch is None:
        raise UsageError(
            f"--lr-scaling {options.lr_scaling} needs --base-batch: "
            "the global batch for which --lr was chosen"
        )
