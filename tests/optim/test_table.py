"""The table agrees with the libraries that it names."""

from importlib import import_module
from inspect import Parameter, signature
from typing import get_args

import pytest

from paceline.optim.table import OPTIMIZER_OPTIONS, OPTIMIZERS, OptimizerName, optimizers_with


def _constructor(name: OptimizerName) -> dict[str, Parameter]:
    entry = OPTIMIZERS[name]
    return dict(signature(getattr(import_module(entry.module), entry.class_name)).parameters)


def test_table_has_the_names_of_the_option() -> None:
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_defaults_are_the_librarys_own(name: OptimizerName) -> None:
    constructor = _constructor(name)
    entry = OPTIMIZERS[name]
    assert {option: constructor[option].default for option in entry.defaults} == entry.defaults


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fixed_keywords_exist_and_are_no_options(name: OptimizerName) -> None:
    entry = OPTIMIZERS[name]
    assert set(entry.fixed) <= set(_constructor(name))
    assert not set(entry.fixed) & set(OPTIMIZER_OPTIONS)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("option", OPTIMIZER_OPTIONS)
def test_an_option_is_listed_wherever_the_library_has_it(name: OptimizerName, option: str) -> None:
    assert (option in OPTIMIZERS[name].defaults) == (option in _constructor(name))


def test_optimizers_with() -> None:
    assert optimizers_with("momentum") == ("sgd", "lars")
    assert optimizers_with("grad_averaging") == ("novograd", "lamb")
