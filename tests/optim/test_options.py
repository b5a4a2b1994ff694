"""What the user may ask for, and what each refusal says."""

import math
import subprocess
import sys

import pytest

from paceline.errors import UsageError
from paceline.optim.options import OptimOptions, describe_optimizer, optimizer_arguments
from paceline.optim.table import OPTIMIZER_OPTIONS, OPTIMIZERS, OptimizerName, optimizers_with
from paceline.options.fields import OptionValue, flag, option_fields
from tests.launch.waiting import patient

VALUES: dict[str, OptionValue] = {
    "betas": (0.9, 0.99),
    "eps": 1e-6,
    "grad_averaging": False,
    "momentum": 0.9,
    "nesterov": False,
    "rho": 0.95,
    "weight_decay": 1e-4,
}
"""A valid value of each option that depends on the optimizer; booleans off, to be found out too."""


def _options(**given: object) -> OptimOptions:
    return OptimOptions(**given)  # type: ignore[arg-type]  # wrong values are the subject here


def _refusal(**given: object) -> str:
    with pytest.raises(UsageError) as refused:
        _options(**given)
    return str(refused.value)


def test_every_option_is_documented() -> None:
    assert len(option_fields(OptimOptions, "Optimizer")) == 20


def test_importing_the_options_imports_no_torch() -> None:
    check = "import sys, paceline.optim.options; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=patient(60))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_defaults_fit_every_optimizer(name: OptimizerName) -> None:
    assert optimizer_arguments(OptimOptions(optimizer=name)) == OPTIMIZERS[name].defaults


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("option", OPTIMIZER_OPTIONS)
def test_an_option_is_taken_or_refused_naming_who_has_it(name: OptimizerName, option: str) -> None:
    given = {"optimizer": name, option: VALUES[option]}
    if option in OPTIMIZERS[name].defaults:
        assert optimizer_arguments(_options(**given))[option] == VALUES[option]
        return
    message = _refusal(**given)
    assert f"{name} has no --{option.replace('_', '-')}" in message
    assert ", ".join(optimizers_with(option)) in message


def test_momentum_with_adam_says_what_to_do() -> None:
    assert _refusal(optimizer="adam", momentum=0.9) == (
        "adam has no --momentum (given: 0.9). Optimizers that have it: sgd, lars"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("optimizer", "sdg"),
        ("lr_scaling", "cubic"),
        ("schedule", "cosin"),
    ],
)
def test_an_unknown_name_lists_the_known(option: str, value: str) -> None:
    message = _refusal(**{option: value})
    assert value in message
    assert "Known:" in message


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "option",
    [
        "lr",
        "clip_norm",
        "weight_decay",
        "momentum",
        "warmup_epochs",
        "warmup_steps",
        "warmup_start",
        "step_factor",
        "final_lr_factor",
        "base_batch",
        "step_epochs",
    ],
)
def test_a_value_out_of_range_is_refused(option: str, value: float) -> None:
    message = _refusal(**{option: value})
    assert message.startswith(f"{flag(option)} is {value}; expected ")


@pytest.mark.parametrize(
    ("optimizer", "option", "value"),
    [
        ("sgd", "lr", 0.0),
        ("sgd", "clip_norm", 0.0),
        ("sgd", "momentum", 1.0),
        ("adadelta", "rho", 1.0),
        ("adam", "eps", -1e-8),
        ("adam", "betas", (0.9, 1.0)),
        ("adam", "betas", (0.9,)),
        ("adam", "betas", (0.9, math.nan)),
        ("sgd", "base_batch", 0),
        ("sgd", "step_epochs", 0),
        ("sgd", "warmup_start", 1.1),
    ],
)
def test_the_edges_of_the_ranges(optimizer: str, option: str, value: object) -> None:
    assert _refusal(optimizer=optimizer, **{option: value}).startswith(f"{flag(option)} is ")


def test_betas_of_the_older_novograd_are_allowed() -> None:
    assert OptimOptions(optimizer="novograd", betas=(0.95, 0.0)).betas == (0.95, 0.0)


def test_nesterov_needs_momentum() -> None:
    assert "nesterov needs a momentum" in _refusal(nesterov=True)
    assert "nesterov needs a momentum" in _refusal(optimizer="lars", nesterov=True, momentum=0.0)
    OptimOptions(optimizer="lars", nesterov=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"warmup_epochs": 1.0, "warmup_steps": 10}, "both give the length of the warm-up"),
        ({"warmup_start": 0.5}, "there is no warm-up"),
        ({"schedule": "one-cycle", "warmup_epochs": 1.0}, "brings its own warm-up"),
        ({"schedule": "one-cycle", "warmup_steps": 5}, "brings its own warm-up"),
        ({"schedule": "cosine", "step_epochs": 30}, "belongs to the step schedule"),
        ({"step_factor": 0.1}, "the constant schedule has no --step-factor"),
        ({"schedule": "step", "final_lr_factor": 0.0}, "belongs to the cosine schedule"),
        ({"base_batch": 64}, "--lr-scaling is none"),
        ({"lr_scaling": "linear"}, "needs --base-batch"),
        ({"lr_scaling": "sqrt"}, "needs --base-batch"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, object], said: str) -> None:
    assert said in _refusal(**given)


def test_describe_optimizer() -> None:
    assert describe_optimizer(OptimOptions(momentum=0.9, weight_decay=1e-4, clip_norm=1.0)) == (
        "sgd (momentum 0.9, nesterov off, weight decay 0.0001, clip norm 1)"
    )
    assert "betas 0.95 and 0.98" in describe_optimizer(OptimOptions(optimizer="novograd"))
