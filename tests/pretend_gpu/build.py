"""Builds the pretend device (device/) against the CUDA headers that come with torch, once."""

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parent / "device"
_ROOT = SOURCES.parent.parent.parent
_CUDA_MAJOR = "13"
_LIBRARY = "libpretend_gpu.so"
_COMPILE_S = 300.0


def why_no_pretend_gpu() -> str | None:
    """Say why torch here can't use the pretend device; None if it can."""
    import torch

    if sys.platform != "linux":
        return "it is preloaded as Linux does it"
    version = torch.version.cuda
    if version is None:
        return f"torch {torch.__version__} is built without CUDA"
    if version.partition(".")[0] != _CUDA_MAJOR:
        return f"torch {torch.__version__} is built for CUDA {version}, the device is of 13"
    if not headers():
        return f"no headers of CUDA {_CUDA_MAJOR}: they come with its runtime and triton"
    return None


def build() -> Path:
    """Compile the libraries, unless they are there from these very sources.

    Returns:
        Their directory.

    Raises:
        RuntimeError: The compiler doesn't take the sources.
    """
    import torch

    files = sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"), Path(__file__)])
    content = b"".join(path.read_bytes() for path in files)
    content += f"{torch.version.cuda} {headers()}".encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    made = Path(tempfile.gettempdir()) / f"pretend-gpu-{digest}"
    made.mkdir(exist_ok=True)
    with (made / "lock").open("w") as lock:  # several processes of a test session build at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "libnvidia-ml.so.1").exists():
            _compile(made, _version(str(torch.version.cuda)))
    return made


def environment(built: Path, *, devices: int = 1, **settings: str) -> dict[str, str]:
    """Give the variables of a process that has pretend devices.

    Args:
        built: What `build` gave.
        devices: How many there are.
        settings: Others that device/README.md lists, and any variable.
    """
    path = [str(SOURCES), str(_ROOT), os.environ.get("PYTHONPATH", "")]
    ours: Mapping[str, str] = {
        "LD_LIBRARY_PATH": str(built),
        "LD_PRELOAD": str(built / _LIBRARY),
        "TORCH_CUDNN_V8_API_DISABLED": "1",  # the classic interface is all that there is
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "PRETEND_GPU_DEVICES": str(devices),
    }
    return {**os.environ, **ours, **settings}


def headers(packages: Path | None = None) -> list[Path]:
    """List where CUDA's headers are, those of torch's own CUDA first; none if they aren't whole.

    Triton's may be of another major version (torch 2.11 for CUDA 13 comes with 12.8), in which
    structures have another layout; the runtime's lack `crt/`, in which there are only macros.

    Args:
        packages: Where Python packages are installed; this interpreter's by default.
    """
    packages = packages or Path(sysconfig.get_path("purelib"))
    parts = (f"nvidia/cu{_CUDA_MAJOR}/include", "triton/backends/nvidia/include")
    found = [packages / part for part in parts if (packages / part / "cuda_runtime_api.h").exists()]
    is_whole = any((path / "crt" / "host_defines.h").exists() for path in found)
    return found if is_whole and _major(found[0]) == _CUDA_MAJOR else []


def _major(include: Path) -> str:
    """Give the major version of CUDA whose headers these are; nothing if they don't say."""
    text = (include / "cuda_runtime_api.h").read_text()
    said = re.search(r"^#define CUDART_VERSION +(\d+)\d{3}$", text, re.MULTILINE)
    return said[1] if said else ""


def _version(text: str) -> int:
    """13.2 is 13020."""
    major, _, minor = text.partition(".")
    return int(major) * 1000 + int(minor or 0) * 10


def _compile(made: Path, version: int) -> None:
    library, driver = made / _LIBRARY, made / "libcuda.so.1"
    shared = ("c++", "-std=c++17", "-O1", "-fPIC", "-shared")
    # What all calls go to.
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp")) if path.name != "nvml.cpp"]
    isystem = [word for path in headers() for word in ("-isystem", str(path))]
    include = (*isystem, f"-DPRETEND_CUDA_VERSION={version}")
    hidden = ("-fvisibility=hidden", f"-Wl,-soname,{_LIBRARY}")
    _run(*shared, *hidden, *include, "-o", str(library), *sources, "-lpthread", "-lrt")
    # The driver and NVML, which are opened by their names: the one is an empty way to the first.
    empty = made / "empty.cpp"
    empty.write_text("")
    linked = ("-Wl,--no-as-needed", str(library), "-Wl,-soname,libcuda.so.1")
    _run(*shared, "-o", str(driver), str(empty), *linked)
    nvml = ("-Wl,-soname,libnvidia-ml.so.1", str(SOURCES / "nvml.cpp"))
    _run(*shared, "-o", str(made / "unfinished"), *nvml)
    (made / "unfinished").rename(made / "libnvidia-ml.so.1")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
