"""The numbers of the documents that the recipes come from."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torchvision  # noqa: F401  # its first import sets variables of the environment

from paceline.data.augment import uniforms
from paceline.data.memory import TensorData
from paceline.models.wideresnet import WideResNet
from paceline.optim.options import OptimOptions
from paceline.optim.schedule import build_schedule, scaled_lr
from paceline.options.fields import OptionValue
from paceline.recipes.registry import reference_of
from paceline.training.config import TrainConfig, merge
from paceline.training.job import Job
from paceline.training.recipe import Recipe, load_recipe
from tests.support.cifar_files import write_cifar10
from tests.support.idx_files import write_mnist
from tests.support.stl10_files import write_stl10

NUMBERS: Mapping[str, Mapping[str, OptionValue]] = {
    "fashion-wideresnet": {
        "batch_per_worker": 32,
        "epochs": 40,
        "lr": 0.01,
        "target_accuracy": 0.85,
        "patience": 2,
        "optimizer": "sgd",
        "momentum": None,
        "warmup_epochs": 0.0,
        "sync_batchnorm": False,
    },
    "cifar10-wideresnet": {
        "global_batch": 256,
        "lr": 0.15,
        "target_accuracy": 0.85,
        "patience": 2,
        "optimizer": "novograd",
        "betas": (0.95, 0.0),
        "grad_averaging": True,
        "sync_batchnorm": True,
    },
    "stl10-resnet18": {
        "batch_per_worker": 32,
        "epochs": 2,
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "schedule": "step",
        "step_epochs": 30,
        "step_factor": 0.1,
        "target_accuracy": None,
    },
    "imagefolder-vgg19": {
        "batch_per_worker": 32,
        "lr": 1e-4,
        "lr_scaling": "sqrt",
        "base_batch": 32,
        "best_by": "val_loss",
        "time_budget": "2h",
    },
}


def recipe(name: str) -> Recipe:
    return load_recipe(reference_of(name))


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    found = TrainConfig.from_settings(recipe(name).settings).settings()
    assert {n: found[n] for n in NUMBERS[name]} == NUMBERS[name]


@pytest.mark.parametrize(("nodes", "lr"), [(1, 1.00e-4), (2, 1.41e-4), (4, 2.00e-4), (8, 2.83e-4)])
def test_the_rates_of_the_study(nodes: int, lr: float) -> None:
    options = TrainConfig.from_settings(recipe("imagefolder-vgg19").settings).optim
    assert scaled_lr(options, 32 * nodes)[0] == pytest.approx(lr, rel=0.01)


def test_the_warm_up_of_the_course() -> None:
    given: dict[str, OptionValue] = {"warmup_epochs": 5.0, "warmup_start": 0.25, "momentum": 0.9}
    settings = merge(given, recipe("fashion-wideresnet").settings)
    options: OptimOptions = TrainConfig.from_settings(settings).optim
    schedule = build_schedule(options, total_steps=4000, steps_per_epoch=100)
    assert [schedule.factor(step) for step in (0, 500, 3999)] == [0.25, 1.0, 1.0]
    assert schedule.factor(250) == pytest.approx(0.625)


def test_novograd_as_an_option_of_the_course() -> None:
    given: dict[str, OptionValue] = {"optimizer": "novograd", "grad_averaging": True}
    settings = merge({**given, "betas": (0.95, 0.0)}, recipe("fashion-wideresnet").settings)
    assert TrainConfig.from_settings(settings).optim.grad_averaging is True


def test_fashion_is_the_whole_network(tmp_path: Path) -> None:
    write_mnist(tmp_path, 20, 10, name="FashionMNIST")
    job = recipe("fashion-wideresnet")(data_dir=str(tmp_path), download=False)
    assert isinstance(job.model, WideResNet)
    assert sum(p.numel() for p in job.model.parameters()) == 17_117_466
    assert job.augment == ()
    assert class_names(job)[0] == "T-shirt/top"


def test_cifar_is_augmented_and_normalised_by_halves(tmp_path: Path) -> None:
    write_cifar10(tmp_path, 20, 10)
    make = recipe("cifar10-wideresnet")
    job = make(data_dir=str(tmp_path), width=1, download=False)
    assert [repr(change) for change in job.augment] == ["random flip", "shift by up to 4 px"]
    assert_halves(job)
    assert make(data_dir=str(tmp_path), width=1, download=False, augment=False).augment == ()


def test_stl_is_resized_on_the_device(tmp_path: Path) -> None:
    write_stl10(tmp_path, 20, 10)
    job = recipe("stl10-resnet18")(data_dir=str(tmp_path), download=False)
    assert_halves(job)
    assert isinstance(job.train, TensorData)
    assert tuple(job.train.images.shape) == (20, 3, 96, 96)
    for changes in (job.augment, job.evaluate_with):
        (change,) = changes
        draws = uniforms(0, 0, torch.arange(2), 0, change.num_draws)
        assert tuple(change(job.train.images[:2], draws).shape) == (2, 3, 224, 224)
    assert sum(p.numel() for p in job.model.parameters()) == 11_181_642


def assert_halves(job: Job) -> None:
    for data in (job.train, job.validation):
        assert isinstance(data, TensorData)
        assert data.mean == data.std == (0.5, 0.5, 0.5)


def class_names(job: Job) -> tuple[str, ...]:
    assert isinstance(job.train, TensorData)
    return job.train.class_names
