"""The table of optimizers: their classes, options and defaults.

Imports no torch: the command line checks options against this table before anything starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.options.fields import OptionValue

OptimizerName = Literal["sgd", "adam", "adamw", "adadelta", "novograd", "lars", "lamb"]
"""What `--optimizer` takes: the keys of `OPTIMIZERS`."""


# One implementation on every device where bits count: torch's own choice differs by device, and its
# fused kernels may round differently. A hand-tuned loop picks the same one.
_FOREACH: Mapping[str, OptionValue] = {"foreach": True}
FUSED: Mapping[str, OptionValue] = {"foreach": False, "fused": True}
"""Instead of it, where torch has a kernel that updates all weights at once."""


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry:
    """One optimizer: a class of an installed library and the options that it has."""

    module: str
    class_name: str
    defaults: Mapping[str, OptionValue]
    """Option -> the value used when the user gives none; the name is the constructor's keyword too.
    They are the library's own, passed explicitly so that a new version of it changes nothing."""
    fixed: Mapping[str, OptionValue] = field(default_factory=lambda: _FOREACH)
    """Keywords that are always passed and that users don't set."""
    group: Mapping[str, OptionValue] = field(default_factory=dict)
    """Entries of the parameter group that the library reads but has no keyword for."""
    has_fused: bool = False
    """Whether torch has a kernel that updates all weights at once."""
    counts_steps: bool = False
    """Whether a step computes with how many came before: Adam's correction of its averages."""


_ADAM_BETAS = (0.9, 0.999)


def _entry(
    path: str, *, has_fused: bool = False, counts_steps: bool = False, **defaults: OptionValue
) -> OptimizerEntry:
    module, _, class_name = path.rpartition(".")
    return OptimizerEntry(
        module=module,
        class_name=class_name,
        defaults=defaults,
        has_fused=has_fused,
        counts_steps=counts_steps,
    )


def _adam(path: str, weight_decay: float) -> OptimizerEntry:
    return _entry(
        path,
        has_fused=True,
        counts_steps=True,
        betas=_ADAM_BETAS,
        eps=1e-8,
        weight_decay=weight_decay,
    )


# Two things bring the library's LAMB (4.1) to algorithm 2 of the paper without bias correction:
# weight decay inside the trust ratio, and `adam_debias`. Without the latter the step is divided by
# 1 - beta1**t after the trust ratio has normalised it, so the first steps are up to 10 times lr.
# Its own scaling of the gradients by their norm stays off: `clip_norm` alone does that.
_LAMB = OptimizerEntry(
    module="pytorch_optimizer",
    class_name="Lamb",
    defaults={"betas": _ADAM_BETAS, "eps": 1e-6, "grad_averaging": True, "weight_decay": 0.0},
    fixed={**_FOREACH, "weight_decouple": False, "pre_norm": False, "max_grad_norm": 0.0},
    group={"adam_debias": True},
)

OPTIMIZERS: Mapping[OptimizerName, OptimizerEntry] = {
    "sgd": _entry(
        "torch.optim.SGD", has_fused=True, momentum=0.0, nesterov=False, weight_decay=0.0
    ),
    "adam": _adam("torch.optim.Adam", weight_decay=0.0),
    "adamw": _adam("torch.optim.AdamW", weight_decay=0.01),
    # Zeiler 2012, arXiv:1212.5701
    "adadelta": _entry("torch.optim.Adadelta", rho=0.9, eps=1e-6, weight_decay=0.0),
    # Ginsburg et al. 2019, arXiv:1905.11286
    "novograd": _entry(
        "pytorch_optimizer.NovoGrad",
        betas=(0.95, 0.98),
        eps=1e-8,
        grad_averaging=False,
        weight_decay=0.0,
    ),
    # You et al. 2017, arXiv:1708.03888
    "lars": _entry("pytorch_optimizer.LARS", momentum=0.9, nesterov=False, weight_decay=0.0),
    # You et al. 2019, arXiv:1904.00962
    "lamb": _LAMB,
}

OPTIMIZER_OPTIONS: tuple[str, ...] = tuple(
    sorted({option for entry in OPTIMIZERS.values() for option in entry.defaults})
)
"""Every option that at least one optimizer has and that depends on the optimizer."""


def optimizers_with(option: str) -> tuple[OptimizerName, ...]:
    """List the optimizers that have an option, in the order of the table."""
    return tuple(name for name, entry in OPTIMIZERS.items() if option in entry.defaults)
