import json
from pathlib import Path
from typing import cast

import pytest
import torch
import torchvision
from torch import Tensor, nn

from paceline.cli.app import main
from paceline.data.image_folder import ImageSplit
from paceline.data.order import EpochPlan
from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.errors import DataError, ExitCode, UsageError
from paceline.options.fields import OptionValue
from paceline.options.figures import show_percent
from paceline.recipes.registry import reference_of
from paceline.training.batches.sources import describe_data, make_source
from paceline.training.config import TrainConfig
from paceline.training.job import Job
from paceline.training.recipe import load_recipe
from tests.cli.conftest import Paceline, summary
from tests.recipes.cases import Case, assert_reaches_its_target_resumed
from tests.support.image_files import CLASSES, write_image_folder

pytestmark = pytest.mark.ranks

SMALL = "--model vgg11_bn --size 32 --hidden 256 --loader-workers 0 --time-budget none"
COUNTS = {"train": 32, "val": 20, "test": 15}


def build(data_dir: Path, **arguments: OptionValue) -> Job:
    small: dict[str, OptionValue] = {"model": "vgg11", "size": 32, "hidden": 8, "weights": "none"}
    recipe = load_recipe(reference_of("imagefolder-vgg19"))
    return recipe(**{"data_dir": str(data_dir), **small, **arguments})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training on one worker from random weights, beside the folder `images`."""
    place = tmp_path_factory.mktemp("trained")
    write_image_folder(place / "images", COUNTS)
    command = f"train imagefolder-vgg19 --data-dir images --weights none {SMALL} --on here"
    options = "--global-batch 8 --lr 0.002 --epochs 14 --target-accuracy 0.75 --run-dir run"
    done = Paceline(place).run(*command.split(), *options.split())
    assert done.code == 0, done.err
    return place / "run"


@pytest.mark.xdist_group("vgg")
@pytest.mark.slow
def test_it_reaches_its_target_and_judges_the_best_model_on_the_test_set(trained: Path) -> None:
    found = summary(trained)
    assert found["stopped_because"] == "target"
    assert float(str(found["val_accuracy"])) >= 0.75
    assert (found["samples_seen"], found["test_samples"]) == (96 * int(str(found["epochs"])), 45)
    assert 0.5 < float(str(found["test_accuracy"])) <= 1
    assert 0 < float(str(found["test_loss"])) < 1.2
    assert json.loads((trained / "run.json").read_text())["settings"]["best_by"] == "val_loss"


@pytest.mark.xdist_group("vgg")
@pytest.mark.slow
def test_evaluation_knows_the_classes_by_name(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(trained), "--snapshot", "last"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert f"top-1     {show_percent(float(str(summary(trained)['val_accuracy'])))}" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.endswith(" 20")] == [*CLASSES]


@pytest.mark.xdist_group("vgg")
@pytest.mark.slow
def test_from_weights_on_two_workers_resumed(trained: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    assert main(["export", str(trained), str(weights)]) == ExitCode.DONE
    case = Case(
        recipe="imagefolder-vgg19",
        write=lambda root: trained.parent / "images",
        arguments={"model": "vgg11_bn", "size": 32, "hidden": 128, "weights": str(weights)},
        settings={"global_batch": 12, "lr": 0.003, "target_accuracy": 0.75, "time_budget": None},
    )
    assert_reaches_its_target_resumed(case, tmp_path)


def inputs(job: Job, *, train: bool) -> list[Tensor]:
    """The batches of an epoch, or all of validation."""
    config = TrainConfig.from_settings({"loader_workers": 0})
    group = Group(Placement(), torch.device("cpu"), "none")
    served = describe_data(job.train if train else job.validation)
    source = make_source(served, config, group, True, job.augment, job.evaluate_with)
    plan = EpochPlan(seed=3, epoch=1, global_batch=5)
    found = source.train_batches(plan) if train else source.eval_batches(0, 1, 7)
    return [batch.inputs for batch in found]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("tree") / "images", {"train": 4, "val": 2})


def test_images_are_cropped_to_the_size_and_differ_only_if_augmented(images: Path) -> None:
    first, again = (torch.cat(inputs(build(images), train=True)) for _ in range(2))
    augmented = torch.cat(inputs(build(images, augment=True), train=True))
    assert first.shape == (12, 3, 32, 32)
    assert torch.equal(first, again)
    assert not torch.equal(first, augmented)
    assert torch.equal(augmented, torch.cat(inputs(build(images, augment=True), train=True)))
    assert torch.cat(inputs(build(images, augment=True), train=False)).shape == (6, 3, 32, 32)


@pytest.mark.slow
def test_a_test_split_is_judged_and_class_names_are_kept(images: Path, tmp_path: Path) -> None:
    assert build(images).test is None
    job = build(write_image_folder(tmp_path / "images", {"train": 2, "val": 1, "test": 3}))
    assert len(cast(ImageSplit, job.test)) == 9
    assert cast(ImageSplit, job.train).class_names == CLASSES
    assert job.num_classes == 3
    assert job.model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_without_validation_images_it_says_where_they_go(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "images", {"train": 2})
    with pytest.raises(DataError, match=r"val is missing.* val/CLASS"):
        build(root)


@pytest.mark.parametrize("name", ["size", "hidden"])
def test_sizes_of_nothing(name: str, images: Path) -> None:
    with pytest.raises(UsageError, match=f"{name} is 0"):
        build(images, **{name: 0})


@pytest.mark.slow
def test_the_encoder_is_taken_over_and_left_unfrozen(images: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = torchvision.models.vgg11(num_classes=7, init_weights=False)
    other.classifier = nn.Sequential()  # its weights don't fit, and are many
    torch.save(other.state_dict(), tmp_path / "encoder.pth")
    model = build(images, weights=str(tmp_path / "encoder.pth")).model
    taken = model.state_dict()
    assert all(torch.equal(taken[n], tensor) for n, tensor in other.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_words_for_weights_are_not_paths() -> None:
    recipe = load_recipe(reference_of("imagefolder-vgg19"))
    found = recipe.resolved({"weights": "none", "data_dir": "images"})
    assert found["weights"] == "none"
    assert found["data_dir"] == str(Path("images").absolute())
    assert recipe.resolved({"weights": "w.pth"})["weights"] == str(Path("w.pth").absolute())
    assert recipe.resolved({})["weights"] == "imagenet"
