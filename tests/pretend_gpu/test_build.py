"""The pretend device is built against the headers of torch's own major of CUDA."""

from pathlib import Path

import pytest

from tests.pretend_gpu.build import headers
from tests.pretend_gpu.host import Host

_RUNTIMES, _TRITONS = "nvidia/cu13/include", "triton/backends/nvidia/include"


def _write(packages: Path, place: str, version: int) -> Path:
    made = packages / place
    made.mkdir(parents=True)
    (made / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    if place == _TRITONS:
        (made / "crt").mkdir()
        (made / "crt" / "host_defines.h").touch()
    return made


def test_the_runtimes_headers_come_before_tritons(tmp_path: Path) -> None:
    tritons = _write(tmp_path, _TRITONS, 12080)
    own = _write(tmp_path, _RUNTIMES, 13000)
    assert headers(tmp_path) == [own, tritons]


def test_tritons_are_taken_where_the_runtime_has_none(tmp_path: Path) -> None:
    assert headers(tmp_path) == []
    tritons = _write(tmp_path, _TRITONS, 13010)
    assert headers(tmp_path) == [tritons]


def test_headers_of_another_major_are_not_taken(tmp_path: Path) -> None:
    _write(tmp_path, _TRITONS, 12080)
    assert headers(tmp_path) == []


@pytest.mark.pretend_gpu
def test_torch_reads_the_properties_where_they_are(gpus: Host, tmp_path: Path) -> None:
    # A structure of another major overwrites what lies behind torch's own.
    script = tmp_path / "look.py"
    script.write_text(
        "import torch\nof = torch.cuda.get_device_properties(1)\nprint(of.name, of.L2_cache_size)\n"
    )
    done = gpus.python(script, directory=tmp_path, devices=2)
    assert done.stdout.split() == ["Pretend", "H100", str(50 << 20)], done.stderr
