import platform
from pathlib import Path

import pytest

from paceline.distributed.system_gpus import driver_version

NVIDIA = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC: 12"
)
OLDER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"


@pytest.mark.parametrize(
    ("text", "version"), [(NVIDIA, "580.95.05"), (OLDER, "550.54.15"), ("6.10.5\n", "6.10.5")]
)
def test_the_drivers_version(text: str, version: str, tmp_path: Path) -> None:
    (tmp_path / "second").write_text(text)
    files = [tmp_path / "first", tmp_path / "second"]
    assert driver_version(files, tmp_path / "none") == version


def test_the_kernels_own_amd_driver_has_the_kernels_version(tmp_path: Path) -> None:
    assert driver_version([tmp_path / "version"], tmp_path) == (
        f"amdgpu of Linux {platform.release()}"
    )
    (tmp_path / "version").write_text("\n")
    assert driver_version([tmp_path / "version"], tmp_path / "none") is None
