"""Trainings need nothing that Apple's GPUs lack: on a pretend device without it they end well."""

from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host
from tests.support.cifar_files import write_cifar10
from tests.support.idx_files import write_mnist
from tests.support.image_files import write_image_folder

pytestmark = pytest.mark.pretend_gpu

PROGRAM = """
import sys
from tests.pretend_gpu.device.limits import become_apples
from paceline.cli.app import main

become_apples()
sys.exit(main())
"""
HERE = ("--on", "here", "--device", "cuda", "--run-dir", "run", "--progress", "off")


def run_like_mps(gpus: Host, directory: Path, command: str) -> None:
    """Run `paceline COMMAND` there, with `--on here` as on MPS: a training forks nothing."""
    (directory / "like_mps.py").write_text(PROGRAM)
    done = gpus.python("like_mps.py", *command.split(), *HERE, directory=directory)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_recipe_with_clipping_averages_and_snapshots(gpus: Host, tmp_path: Path) -> None:
    options = "--clip-norm 5 --ema 0.9 --snapshot-every-steps 7"
    run_like_mps(gpus, tmp_path, f"train digits --epochs 2 {options}")


def test_augmentation_and_half_precision(gpus: Host, tmp_path: Path) -> None:
    write_cifar10(tmp_path / "data", 16, 8)
    run_like_mps(
        gpus,
        tmp_path,
        "train cifar10-wideresnet --data-dir data --no-download --width 1 --epochs 1 "
        "--time-budget none --global-batch 8 --precision fp16",
    )


def test_an_optimizer_by_lists_of_tensors(gpus: Host, tmp_path: Path) -> None:
    write_mnist(tmp_path / "data", 128, 16)
    run_like_mps(gpus, tmp_path, "train mnist --data-dir data --no-download --epochs 1")


def test_images_from_files(gpus: Host, tmp_path: Path) -> None:
    write_image_folder(tmp_path / "data", {"train": 12, "val": 4})
    run_like_mps(
        gpus,
        tmp_path,
        "train imagefolder-vgg19 --data-dir data --model vgg11 --weights none --size 32 "
        "--hidden 8 --augment --epochs 1 --time-budget none --global-batch 4 --loader-workers 1",
    )
