"""What is installed on this host."""

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline._version import __version__
from paceline.distributed.system_gpus import driver_version
from paceline.doctor.facts import SoftwareFacts

_LIBRARIES = ("torch", "numpy", "torchvision")
_FIRST = 12
_PACKAGE = Path(__file__).parents[2]


def software_facts() -> SoftwareFacts:
    """List versions; imports torch."""
    versions = {
        "Paceline": __version__,
        "Paceline's code": code_hash(_PACKAGE),
        "Python": platform.python_version(),
        **{library: _installed_version(library) for library in _LIBRARIES},
    }
    driver = {} if (known := driver_version()) is None else {"driver": known}
    try:
        return SoftwareFacts(versions=versions | _of_torch() | driver)
    except Exception as error:  # noqa: BLE001  # a broken installation may raise anything
        problem = f"{type(error).__name__}: {error}"
        return SoftwareFacts(versions=versions | driver, torch_problem=problem)


def _installed_version(package: str) -> str:
    """Give a package's version; `none` where it isn't installed. Imports nothing of it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def code_hash(package: Path) -> str:
    """Hash a package's sources, which may differ under one version number."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:_FIRST]


def capability() -> str:
    """Name the vector instructions that torch uses here."""
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _of_torch() -> dict[str, str]:
    import torch

    versions = {}
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    if torch.version.hip:
        versions["ROCm"] = torch.version.hip
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()
        versions["NCCL"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
    return versions
