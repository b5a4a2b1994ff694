"""Runs first in SageMaker's container: unpacks the code, then becomes the training's command.

It is uploaded beside the code and needs nothing but Python, since Paceline may not be there yet.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

INPUT = Path("/opt/ml/input")
CODE = Path("/opt/ml/code")
SMDDP_INSTANCES = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p4de.24xlarge")
"""Where SageMaker's own backend runs, by its documentation."""


def main() -> None:
    """Unpack, install what is missing, and become the command."""
    channel = Path(__file__).resolve().parent
    job = json.loads((channel / "job.json").read_text())
    resources = json.loads((INPUT / "config" / "resourceconfig.json").read_text())
    # Unpack the code.
    CODE.mkdir(parents=True, exist_ok=True)
    with tarfile.open(channel / "code.tar.gz") as archive:
        if sys.version_info >= (3, 11, 4):  # Python before it has no filters, and trusts an archive
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(CODE)
    os.chdir(CODE)
    # Install what it needs; modules that are new must be found in this process too.
    install(job["requirement"])
    os.environ.update(variables(resources, job["command"], dict(os.environ)))
    importlib.invalidate_caches()
    sys.stdout.flush()
    # Become the training, so that SIGTERM of the service reaches it. Sorted first is rank 0.
    words = with_host(job["command"], sorted(resources["hosts"])[0])
    os.execv(sys.executable, [sys.executable, *words])


def install(requirement: str) -> None:
    """Install what the code asks for in requirements.txt, and Paceline where it is missing."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if Path("requirements.txt").is_file():
        subprocess.run([*pip, "-r", "requirements.txt"], check=True)
        importlib.invalidate_caches()
    if importlib.util.find_spec("paceline") is None:
        subprocess.run([*pip, requirement], check=True)


def variables(
    resources: Mapping[str, object], command: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Derive variables of the training from the resource configuration; those that are set stay.

    Args:
        environment: What is set already, which counts.
    """
    hosts = resources["hosts"]
    assert isinstance(hosts, list)
    own = resources["current_host"]
    set_here = {"PACELINE_NODE": str(sorted(hosts).index(own)), "PYTHONUNBUFFERED": "1"}
    interface = str(resources.get("network_interface_name") or "")
    if interface in {name for _, name in socket.if_nameindex()}:
        set_here |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    has_backend = any(word.partition("=")[0] == "--backend" for word in command)
    if not has_backend and has_smddp(str(resources.get("current_instance_type") or ""), len(hosts)):
        set_here["PACELINE_BACKEND"] = "smddp"
    return {name: value for name, value in set_here.items() if name not in environment}


def has_smddp(instance_type: str, hosts: int) -> bool:
    """Tell whether SageMaker's backend is in this image, and is of use on these instances."""
    if instance_type not in SMDDP_INSTANCES or hosts < 2:
        return False
    try:
        return importlib.util.find_spec("smdistributed.dataparallel.torch.torch_smddp") is not None
    except ImportError:
        return False


def with_host(command: Sequence[str], host: str) -> list[str]:
    """Insert `--host` (of rank 0) among the starting program's own options, before the `--`."""
    at = command.index("--")
    return [*command[:at], "--host", host, *command[at:]]


if __name__ == "__main__":
    main()
