import ctypes.util
import platform
import subprocess
from pathlib import Path

import pytest

from paceline.distributed.system_gpus import (
    driver_version,
    near_cores,
    read_cores,
    read_utilization,
    show_cores,
)
from tests.support.needs import COMPILER, need

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


ADDRESS = "0000:41:00.0"
# What of NVML is asked for, by the header that NVIDIA publishes; it knows one GPU, 37 % busy.
NVML = f"""
#include <string.h>
typedef struct {{ unsigned int gpu, memory; }} rates_t;
static int begun = 0;
int nvmlInit_v2(void) {{ begun = 1; return 0; }}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {{
  if (!begun) return 1;
  *device = (void *)&begun;
  return strcmp(bus, "{ADDRESS}") ? 6 : 0;
}}
int nvmlDeviceGetUtilizationRates(void *device, rates_t *rates) {{
  if (device != (void *)&begun) return 2;
  rates->gpu = 37; rates->memory = 80;
  return 0;
}}
"""


def test_how_busy_amds_driver_says_a_gpu_is(tmp_path: Path) -> None:
    (tmp_path / ADDRESS).mkdir()
    file = tmp_path / ADDRESS / "gpu_busy_percent"
    file.write_text("87\n")
    read = read_utilization(ADDRESS, tmp_path, library="libno-such.so")
    assert read is not None
    assert read() == 0.87
    file.write_text("")
    assert read() is None
    file.unlink()
    assert read() is None
    assert read_utilization(ADDRESS, tmp_path, library="libno-such.so") is None


@pytest.mark.slow
def test_how_busy_nvidias_driver_says_a_gpu_is(tmp_path: Path) -> None:
    need(COMPILER)
    library = tmp_path / "libnvml.so"
    build = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(build, input=NVML, text=True, check=True)
    read = read_utilization(ADDRESS, tmp_path, str(library))
    assert read is not None
    assert read() == 0.37
    assert read_utilization("0000:42:00.0", tmp_path, str(library)) is None
    assert read_utilization(ADDRESS, tmp_path, ctypes.util.find_library("c") or "") is None


def test_the_cores_near_a_gpu(tmp_path: Path) -> None:
    (tmp_path / ADDRESS).mkdir()
    assert near_cores(ADDRESS, tmp_path) == frozenset()
    (tmp_path / ADDRESS / "local_cpulist").write_text("0-3,8,10-11\n")
    (tmp_path / ADDRESS / "numa_node").write_text("1\n")
    assert near_cores(ADDRESS, tmp_path) == {0, 1, 2, 3, 8, 10, 11}
    (tmp_path / ADDRESS / "numa_node").write_text("-1\n")  # the firmware doesn't tell
    assert near_cores(ADDRESS, tmp_path) == frozenset()
    (tmp_path / ADDRESS / "numa_node").write_text("0\n")
    (tmp_path / ADDRESS / "local_cpulist").write_text("\n")
    assert near_cores(ADDRESS, tmp_path) == frozenset()


@pytest.mark.parametrize("listed", ["0", "0-3", "0-3,8,10-11", "2,4"])
def test_lists_of_cores_are_written_as_they_are_read(listed: str) -> None:
    assert show_cores(read_cores(listed)) == listed
