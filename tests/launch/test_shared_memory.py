import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.launch import process_tree
from paceline.launch.process_tree import SCRATCH_VARIABLE, adopt_orphans, free_shared
from paceline.launch.processes import descendants, reap
from tests.support.tiers import slow

_SHARES = """
import torch
from paceline.launch.process_tree import note_sharing
note_sharing()
torch.multiprocessing.set_sharing_strategy("file_system")
shared = [torch.ones(9).share_memory_() for _ in range(20)]
print(flush=True)
input()
"""
"""A process that hands tensors over as loader processes do."""

Sharing = subprocess.Popen[bytes]


@pytest.fixture
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:  # shorter than tmp_path: a socket is to fit
        yield Path(path)


@pytest.fixture
def sharing(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sharing]:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    adopt_orphans(True)
    process = subprocess.Popen(
        [sys.executable, "-c", _SHARES], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()
    adopt_orphans(False)


def others(sharing: Sharing) -> set[int]:
    """List the processes that tests share: the fork server and its resource tracker."""
    own = {child.pid for child in psutil.Process(sharing.pid).children(recursive=True)}
    return descendants() - own - {sharing.pid}


@pytest.mark.parametrize("has_ended", [slow(False), True])
@pytest.mark.slow
def test_no_shared_memory_of_loader_processes_stays(
    has_ended: bool, sharing: Sharing, tmp_path: Path, temporary: Path
) -> None:
    spared = others(sharing)

    def objects() -> list[Path]:
        return list(Path("/dev/shm").glob(f"torch_{sharing.pid}_*"))

    assert len(objects()) == 20
    assert [path.name[:14] for path in temporary.iterdir()] == ["torch-shm-dir-"]
    if has_ended:
        sharing.kill()
        sharing.wait()
    reap(spared)
    free_shared(tmp_path / "scratch")
    assert objects() == []
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_what_others_share_is_left_alone(sharing: Sharing, tmp_path: Path) -> None:
    spared = others(sharing)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "shares-1").touch()
    free_shared(tmp_path / "other")
    assert len(list(Path("/dev/shm").glob(f"torch_{sharing.pid}_*"))) == 20
    sharing.kill()
    sharing.wait()
    reap(spared)
    free_shared(tmp_path / "scratch")


def test_memory_shared_with_other_containers_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --ipc=host a number may be that of a living process of another container."""
    (tmp_path / "shares-7").touch()
    memory = tmp_path / "memory"
    memory.mkdir()
    (memory / "torch_7_1_0").touch()
    monkeypatch.setattr(process_tree, "_SHARED_MEMORY", memory)
    monkeypatch.setattr(process_tree, "in_first_namespace", lambda kind: kind == "ipc")
    free_shared(tmp_path)
    assert list(memory.iterdir())
    monkeypatch.setattr(process_tree, "in_first_namespace", lambda kind: False)
    free_shared(tmp_path)  # its own: the usual container
    assert not list(memory.iterdir())
