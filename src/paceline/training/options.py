"""Options of the training loop, and of how a step is computed."""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.options.durations import parse_duration_s

Precision = Literal["fp32", "bf16", "fp16"]
CompileMode = Literal["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
Tf32 = Literal["auto", "off", "convolutions", "on"]
BestBy = Literal["val_accuracy", "val_loss"]


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How long to train, and what ends it early."""

    epochs: int = 10
    """Passes over the training set."""

    target_accuracy: float | None = None
    """Stop once the validation accuracy (0 to 1) has reached this; `none` turns a recipe's own
    target off."""

    patience: int = 1
    """How many epochs in a row must meet the target accuracy."""

    early_stopping: int | None = None
    """Stop after this many epochs in a row without a better validation result; `none` never
    does."""

    best_by: BestBy = "val_accuracy"
    """Which validation figure makes a snapshot the best one."""

    time_budget: None | str = None  # noqa: RUF036  # the first type that fits is taken
    """Train for this long, for example 2h: the schedule is fitted to it, and time is kept back for
    the last evaluation and snapshot. The number of epochs stays an upper bound. `none` turns a
    recipe's own budget off."""

    label_smoothing: float = 0.0
    """Share of the target probability spread over all classes."""

    ema: float | None = None
    """Keep an exponential moving average of the weights with this decay (0.999, say), which
    evaluations, the best snapshot and export take. `none` turns a recipe's own off."""

    seed: int = 0
    """Settles the weights at the start, the order of the samples, augmentation and dropout."""

    check_every: int | None = None
    """Compare the workers' weights and learning rates every this many steps, bit by bit, and name a
    worker that has drifted; 0 never does. Default: 100 with --shards; else rates after each
    epoch, and weights after the first and at the end, where a difference is a warning."""

    def __post_init__(self) -> None:
        _at_least_1("--epochs", self.epochs)
        _at_least_1("--patience", self.patience)
        _at_least_1("--early-stopping", self.early_stopping)
        if self.check_every is not None and self.check_every < 0:
            raise UsageError(f"--check-every must be at least 0, not {self.check_every}")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            given = self.target_accuracy
            hint = f": for {given:g} % write {given / 100:g}" if 1 < given <= 100 else ""
            raise UsageError(
                f"--target-accuracy is a fraction between 0 and 1, not {given:g}{hint}"
            )
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(
                f"--label-smoothing must be at least 0 and below 1, not {self.label_smoothing}"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"--ema is a decay above 0 and below 1, such as 0.999, not {self.ema}")
        if self.time_budget is not None:
            parse_duration_s(self.time_budget, "--time-budget")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be a whole number from 0 on, not {self.seed}")


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a step is computed on the device."""

    precision: Precision = "fp32"
    """Arithmetic of the forward and backward pass: bf16 and fp16 use autocast, fp16 with a loss
    scaler; weights stay in fp32."""

    tf32: Tf32 = "auto"
    """Whether NVIDIA GPUs may multiply fp32 numbers in TF32 (10 bits of fraction instead of 23,
    several times as fast): off; convolutions alone; on, in matrix products too. auto: as PyTorch
    and the script have it, by default convolutions alone."""

    deterministic: bool = False
    """Take kernels that give the same bits every time, where there are others, as on GPUs.
    --shards does so anyway."""

    cudnn_benchmark: bool | None = None
    """Have cuDNN try its kernels out for each new shape of a batch, on NVIDIA GPUs: up to seconds
    each time, and rarely faster than what it takes unasked. Default: as PyTorch and the script
    have it, which is off."""

    compile: bool = False
    """Compile the model with torch.compile: pays off in long trainings, costs a minute at the
    start."""

    compile_mode: CompileMode | None = None
    """Mode of torch.compile: reduce-overhead launches CUDA graphs, so that small models don't wait
    for the host; max-autotune times kernels. Default: torch.compile's own."""

    sync_batchnorm: bool = False
    """Take BatchNorm's statistics over the batches of all workers instead of each worker's own."""

    allow_different_hardware: bool = False
    """With --shards: resume although hardware, libraries or the number of threads differ from
    before, or between workers. What differs is said; the bits may differ from then on."""

    def __post_init__(self) -> None:
        if self.compile_mode is not None and not self.compile:
            raise UsageError(f"--compile-mode {self.compile_mode} needs --compile")
        if self.deterministic and self.times_kernels:
            raise UsageError(
                f"--deterministic can't be combined with --compile-mode {self.compile_mode}, which "
                "chooses kernels by the clock. Leave one of the two out"
            )
        if self.deterministic and self.cudnn_benchmark:
            raise UsageError(
                "--deterministic can't be combined with --cudnn-benchmark: kernels would follow "
                "the clock. Give one of them"
            )

    @property
    def times_kernels(self) -> bool:
        """Whether compilation chooses kernels by the clock, which may change the bits."""
        return (self.compile_mode or "").startswith("max-autotune")


def _at_least_1(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{name} must be at least 1, not {value}")
