from pathlib import Path

import pytest
import torch
import torchvision  # noqa: F401  # its first import sets variables of the environment

from paceline.data.memory import MemorySource, TensorData
from paceline.errors import DataError, UsageError
from paceline.options.fields import OptionValue
from paceline.recipes.registry import BUILT_IN, DEFAULT, reference_of
from paceline.training.config import TrainConfig
from paceline.training.job import Job
from paceline.training.losses import build_loss
from paceline.training.recipe import Recipe, load_recipe
from tests.support.idx_files import write_mnist


def built_in(name: str) -> Recipe:
    return load_recipe(reference_of(name))


def assert_trains(job: Job) -> None:
    """One batch goes through the model and its loss reaches every weight."""
    assert isinstance(job.train, TensorData)
    (batch, *_) = MemorySource(job.train, augment=job.augment).eval_batches(0, 1, 8)
    build_loss(job.loss, 0.0)(job.model(batch.inputs), batch.targets).backward()
    for name, parameter in job.model.named_parameters():
        assert parameter.grad is not None, name


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_recipe_says_what_it_is_and_its_settings_hold(name: str) -> None:
    recipe = built_in(name)
    assert recipe.name == name
    assert 20 < len(recipe.summary) < 90
    TrainConfig.from_settings(recipe.settings)
    assert len({"global_batch", "batch_per_worker"} & recipe.settings.keys()) == 1
    for argument in recipe.arguments():
        assert argument.help, argument.name


def test_the_default_is_built_in() -> None:
    assert DEFAULT in BUILT_IN


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown recipe 'digitz'\. Did you mean 'digits'\?") as e:
        reference_of("digitz")
    listed = ", ".join(sorted(BUILT_IN))
    assert f"{listed}; or your own as file.py:function" in str(e.value)
    assert reference_of("my_job.py:build") == "my_job.py:build"


def test_digits() -> None:
    job = built_in("digits")()
    assert isinstance(job.train, TensorData)
    assert isinstance(job.validation, TensorData)
    assert (job.train.num_samples, job.validation.num_samples) == (1442, 355)
    assert len(job.augment) == 1
    assert built_in("digits")(shift=0).augment == ()
    assert_trains(job)


def test_digits_passes_its_arguments_on() -> None:
    model = built_in("digits")(dropout=0.45).model
    drops = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert drops == [0.45, 0.45]


@pytest.mark.parametrize("gz", [True, False])
def test_mnist_from_files_in_its_real_format(gz: bool, tmp_path: Path) -> None:
    directory = write_mnist(tmp_path / "mnist", train=64, test=16, gz=gz)
    job = built_in("mnist")(data_dir=str(directory), download=False)
    assert isinstance(job.train, TensorData)
    assert isinstance(job.validation, TensorData)
    assert tuple(job.train.images.shape) == (64, 1, 28, 28)
    assert job.validation.num_samples == 16
    assert_trains(job)


def test_mnist_without_files_names_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        built_in("mnist")(data_dir=str(tmp_path), download=False)


SMALL: dict[str, OptionValue] = {"samples": 10, "val_samples": 4, "size": 32, "classes": 7}


def test_synthetic_takes_any_torchvision_model() -> None:
    job = built_in("synthetic")(model="squeezenet1_1", **SMALL)
    assert isinstance(job.train, TensorData)
    assert isinstance(job.validation, TensorData)
    assert tuple(job.train.images.shape) == (10, 3, 32, 32)
    assert job.validation.num_samples == 4
    assert not torch.equal(job.train.images[:4], job.validation.images)
    assert job.model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert_trains(job)


def test_an_unknown_torchvision_model_lists_the_known() -> None:
    with pytest.raises(UsageError, match="Did you mean 'resnet18'"):
        built_in("synthetic")(model="resnet81", **SMALL)


@pytest.mark.parametrize("name", ["samples", "size", "classes"])
def test_synthetic_sizes_of_nothing(name: str) -> None:
    with pytest.raises(UsageError):
        built_in("synthetic")(model="squeezenet1_1", **{**SMALL, name: 0})
