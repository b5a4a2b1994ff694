"""What this machine tells of itself."""

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline._version import __version__
from paceline.doctor.probes import machine, network, software, storage


def test_the_network() -> None:
    found = network.network_facts()
    assert found.hostname == socket.gethostname()
    low, high = found.port_range
    assert 0 < low < high < 65536
    loopback = found.interface_with("127.0.0.1")
    assert loopback is not None
    assert loopback.mtu > 1000
    assert loopback.speed_bytes_per_s is None
    assert found.interfaces[-1] == loopback


_ASK_KERNEL = """
import socket
with socket.socket() as one:
    name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    print(name.split(b"\\0")[0].decode())
"""


def test_the_congestion_control() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _ASK_KERNEL], capture_output=True, text=True, check=True
    )
    assert network.network_facts().congestion == told.stdout.strip()


def test_names() -> None:
    assert network.meanings(["localhost", "no-such-host.invalid", "x" * 300]) == {
        "localhost": "127.0.0.1",
        "no-such-host.invalid": None,
        "x" * 300: None,
    }


def test_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_WATCHED_S", 0.05)
    found = machine.machine_facts()
    assert found.cores == len(os.sched_getaffinity(0))
    assert 0 < found.available_bytes <= found.memory_bytes
    assert found.busy_cores >= 0
    assert found.steal_share is None or 0 <= found.steal_share <= 1


def test_limits() -> None:
    found = machine.limit_facts()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found.open_files == (None if soft == resource.RLIM_INFINITY else soft)


def test_versions() -> None:
    found = software.software_facts()
    assert found.torch_problem == ""
    assert found.versions["Paceline"] == __version__
    assert found.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert software.capability() == torch.backends.cpu.get_cpu_capability()


def test_the_code_is_hashed_by_names_and_content(tmp_path: Path) -> None:
    def hashed(name: str, content: str) -> str:
        for old in tmp_path.iterdir():
            old.unlink()
        (tmp_path / name).write_text(content)
        return software.code_hash(tmp_path)

    assert len({hashed("a.py", "1"), hashed("a.py", "2"), hashed("b.py", "1")}) == 3
    assert hashed("a.py", "1") == hashed("a.py", "1")


def test_copies_that_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(machine.wrong_copies(["cpu", "cpu"])) == []

    def lose(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return self  # as some machines do it between GPUs: no error, and no data

    monkeypatch.setattr(torch.Tensor, "copy_", lose)
    assert list(machine.wrong_copies(["cpu"])) == ["cpu to cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpus() -> None:
    found = machine.gpu_facts()
    assert (found.kind, found.names, found.problem) == ("", (), "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpus() -> None:
    found = machine.gpu_facts()
    assert found.kind == "cuda"
    assert len(found.names) == torch.cuda.device_count()
    assert found.wrong_copies == ()
    assert all(0 < f <= m for f, m in zip(found.free_bytes, found.memory_bytes, strict=True))


def test_the_disk(tmp_path: Path) -> None:
    found = storage.disk_facts(str(tmp_path / "runs" / "new"))
    assert found.directory == str(tmp_path)
    assert found.problem == ""
    assert 0 < found.free_bytes <= found.total_bytes
    assert found.write_bytes_per_s is not None
    assert found.write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: Path) -> float:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(storage, "_write_speed", refuse)
    assert storage.disk_facts(str(tmp_path)).problem == "Read-only file system"


def test_a_mark_is_seen_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_LOOKING_S", 0.0)
    path, text = storage.leave_mark(str(tmp_path / "runs"))
    assert storage.sees_mark(path, text)
    assert not storage.sees_mark(path, "another")
    assert not storage.sees_mark(f"{path}x", text)
    assert not storage.sees_mark("/no/such/place", text)
    storage.remove_mark(path)
    assert list(tmp_path.iterdir()) == []


def test_only_marks_are_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    storage.remove_mark(str(tmp_path / "precious"))
    assert (tmp_path / "precious").exists()
