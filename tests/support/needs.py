"""What tests need of the machine beside Python: tried out, once in a session, before it is used.

Being root, or finding a program, says little: a container may forbid namespaces and mounts even to
its root. So a need is met if what it is for works.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from benchmarks.ordered_hosts import why_not as why_no_namespaces
from tests.launch.waiting import patient

REQUIRE_ALL = "PACELINE_TEST_REQUIRE_ALL"
"""Set where everything is installed, as in CI: there what is missing is a failure, not a skip."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Need:
    """Something that a machine may lack."""

    what: str
    """What it is, after "needs"."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Debian's packages by the programs that are used."""
    attempt: Callable[[Path], str | None] = lambda _: None
    """Tries it out with the programs there, in an empty directory; says why it doesn't work."""
    builds_on: "Sequence[Need]" = ()


def need(*needs: Need) -> None:
    """Skip a test where one of these isn't met; fail it where all have to be."""
    missing = [f"{one.what}: {reason}" for one in needs if (reason := why_not(one)) is not None]
    if not missing:
        return
    text = f"needs {'; '.join(missing)}"
    if os.environ.get(REQUIRE_ALL):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


@cache
def why_not(one: Need) -> str | None:
    """Say why a need isn't met, with the packages that are missing; None if it is."""
    for below in one.builds_on:
        if (reason := why_not(below)) is not None:
            return reason
    lacking = [program for program in one.programs if shutil.which(program) is None]
    if lacking:
        packages = sorted({word for name in lacking for word in one.programs[name].split()})
        return f"no {', '.join(lacking)} (Debian: {' '.join(packages)})"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return one.attempt(Path(scratch))
        except (OSError, RuntimeError, AssertionError, subprocess.SubprocessError) as error:
            return _gist(str(error) or type(error).__name__)


def _try(*command: str, **environment: str) -> str | None:
    """Run a command: why it failed, in its own words."""
    done = subprocess.run(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=patient(60.0),
    )
    if done.returncode == 0:
        return None
    return _gist(done.stderr) or f"{command[0]} ended with {done.returncode}"


def _gist(text: str) -> str:
    """Give the first line and the last: what failed, and what a log after it ends with."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))


def _build_a_rig(directory: Path) -> str | None:
    from tests.hosts.rig import Rig  # the rig's own tests import this module

    if sys.platform != "linux":
        return "it is made of Linux's namespaces"
    with Rig(directory, 1, {}) as rig:
        done = rig.client.run([*rig.ssh(0), "hostname"])
        return None if done.stdout == "h0\n" else f"ssh said {_gist(done.stderr)!r}"


def _mount_memory(directory: Path) -> str | None:
    reason = _try("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory))
    return reason or _try("umount", str(directory))


def _compile(directory: Path) -> str | None:
    (directory / "a.c").write_text("#include <time.h>\nint a(void) { return (int)time(0); }\n")
    library = ("-shared", "-fPIC", "-o", str(directory / "a.so"))
    return _try("cc", *library, str(directory / "a.c"), "-ldl")


def _preload_a_device(directory: Path) -> str | None:
    from tests.pretend_gpu.build import why_no_pretend_gpu  # imports torch

    (directory / "a.cpp").write_text("#include <mutex>\nstd::mutex a;\n")
    library = ("-shared", "-fPIC", "-o", str(directory / "a.so"), str(directory / "a.cpp"))
    return _try("c++", "-std=c++17", *library) or why_no_pretend_gpu()


def _filter_packets(_: Path) -> str | None:
    return _try("unshare", "--net", "nft", "add", "table", "inet", "tried")


def _render(directory: Path) -> str | None:
    browser = find_browser()
    if browser is None:
        return f"no {' or '.join(BROWSERS)} (Debian: chromium)"
    profile = f"--user-data-dir={directory}"
    headless = ("--headless=new", "--no-sandbox", "--disable-gpu")
    return _try(browser, *headless, profile, "--dump-dom", "about:blank")


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Find Chromium, or what is built from it."""
    return next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

HOSTS = Need(
    what="a network of hosts",
    programs={
        "unshare": "util-linux",
        "nsenter": "util-linux",
        "mount": "mount",
        "ip": "iproute2",
        "tc": "iproute2",
        "ss": "iproute2",
        "ping": "iputils-ping",
        "ps": "procps",
        "ssh": "openssh-client",
        "ssh-keygen": "openssh-client",
        "sshd": "openssh-server",
    },
    attempt=_build_a_rig,
)
PROCESS_NAMESPACES = Need(
    what="namespaces of processes",
    programs={"unshare": "util-linux", "true": "coreutils"},
    attempt=lambda _: _try("unshare", "--pid", "--ipc", "--fork", "--mount-proc", "true"),
)
NAMESPACES = Need(
    what="network namespaces",
    programs={"ip": "iproute2", "tc": "iproute2"},
    attempt=lambda _: why_no_namespaces(),
)
PACKET_FILTER = Need(
    what="a packet filter",
    programs={"nft": "nftables"},
    attempt=_filter_packets,
    builds_on=[HOSTS],
)
SLURM = Need(
    what="Slurm",
    programs={
        "sbatch": "slurm-wlm",
        "srun": "slurm-wlm",
        "salloc": "slurm-wlm",
        "sinfo": "slurm-wlm",
        "scontrol": "slurm-wlm",
        "slurmctld": "slurmctld",
        "slurmd": "slurmd",
        "munged": "munge",
    },
    builds_on=[HOSTS],
)
OPEN_MPI = Need(
    what="Open MPI",
    programs={"mpirun.openmpi": "openmpi-bin"},
    attempt=lambda _: _try("mpirun.openmpi", "--oversubscribe", "-n", "2", "true", **AS_ROOT),
)
MPICH = Need(
    what="MPICH",
    programs={"mpirun.mpich": "mpich"},
    attempt=lambda _: _try("mpirun.mpich", "-n", "2", "true"),
)
BROWSER = Need(
    what="a browser", programs={"chromedriver": "chromium chromium-driver"}, attempt=_render
)
PRETEND_GPU = Need(
    what="the pretend CUDA device",
    programs={"c++": "g++ libc6-dev"},
    attempt=_preload_a_device,
)
COMPILER = Need(what="a C compiler", programs={"cc": "gcc libc6-dev"}, attempt=_compile)
MEMORY_DISK = Need(
    what="a small disk in memory",
    programs={"mount": "mount", "umount": "mount"},
    attempt=_mount_memory,
)
RSYNC = Need(
    what="rsync", programs={"rsync": "rsync"}, attempt=lambda _: _try("rsync", "--version")
)
SSH = Need(
    what="OpenSSH's client",
    programs={"ssh": "openssh-client", "ssh-keygen": "openssh-client"},
    attempt=lambda _: _try("ssh", "-V"),
)
FISH = Need(what="fish", programs={"fish": "fish"}, attempt=lambda _: _try("fish", "-c", "true"))
GIT = Need(what="git", programs={"git": "git"}, attempt=lambda _: _try("git", "--version"))
SYSTEMD = Need(
    what="systemd's calendar",
    programs={"systemd-analyze": "systemd"},
    attempt=lambda _: _try("systemd-analyze", "calendar", "2030-01-01 00:00:00 UTC"),
)
ZSH = Need(what="zsh", programs={"zsh": "zsh"}, attempt=lambda _: _try("zsh", "-c", "true"))
