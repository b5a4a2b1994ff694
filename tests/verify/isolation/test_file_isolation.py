"""What a verified script writes, and the processes it starts, by the real command."""

from pathlib import Path

import pytest

from paceline.verify.isolation.file_isolation import changes, files_below
from paceline.verify.isolation.landlock import landlock_version
from tests.verify.conftest import Verify
from tests.verify.faults.scripts import BY_HAND

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("verify")]
confined = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")

SAVING = BY_HAND.replace(
    "dist.destroy_process_group()",
    """
    import os, shutil, subprocess
    import numpy as np
    from safetensors.torch import save_file

    top = os.path.dirname(os.path.abspath(__file__))
    if rank == 0:
        torch.save({"epoch": epoch}, "checkpoint.pth.tar")
        shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
        os.makedirs(f"{top}/runs/new", exist_ok=True)
        np.save(f"{top}/runs/new/x.npy", np.arange(3))
        save_file(model.state_dict(), "model.safetensors")
        with open("log.txt", "a") as log:
            print(epoch, file=log)
        if epoch:
            os.remove("notes.txt")
    dist.barrier()
    assert torch.load(f"{top}/model_best.pth.tar")["epoch"] == epoch
    assert open("log.txt").read().split() == ["mine", *map(str, range(epoch + 1))]
    assert os.path.exists("notes.txt") == (not epoch)
dist.destroy_process_group()
""",
)
OWN = {"model_best.pth.tar": "best", "log.txt": "mine\n", "notes.txt": "mine", "kept.txt": "mine"}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with files of the user's."""
    for name, text in OWN.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def is_untouched(own: Path) -> bool:
    found = {path.name: path.read_text() for path in own.iterdir() if path.name != "train.py"}
    return found == OWN


@pytest.mark.slow
@pytest.mark.parametrize("has_landlock", [True, False])
def test_nothing_that_a_script_writes_reaches_its_users_files(
    verify: Verify, own: Path, monkeypatch: pytest.MonkeyPatch, has_landlock: bool
) -> None:
    if not has_landlock:
        monkeypatch.setattr("paceline.verify.launches.landlock_version", lambda: 0)
    (own / "train.py").write_text(SAVING)
    done = verify("train.py", "--tolerance", "1e-4")
    assert done.code == 0, done.out + done.err
    assert is_untouched(own)
    assert "WARNING" not in done.err


SHELL = BY_HAND + "\nimport subprocess\nsubprocess.run('echo bad > kept.txt', shell=True)\n"


@confined
@pytest.mark.slow
def test_what_other_programs_write_is_refused(verify: Verify, own: Path) -> None:
    (own / "train.py").write_text(SHELL)
    assert verify("train.py", "--tolerance", "1e-4").code == 0
    assert is_untouched(own)


@pytest.mark.slow
def test_what_cant_be_refused_is_said(
    verify: Verify, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.verify.launches.landlock_version", lambda: 0)
    (own / "train.py").write_text(SHELL)
    done = verify("train.py", "--tolerance", "1e-4")
    assert f"WARNING: the script has changed {own / 'kept.txt'}" in done.err


SPAWNING = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torch.save({}, "model_best.pth.tar")
    dist.init_process_group("gloo", rank=rank, world_size=world)


if __name__ == "__main__":
"""
_STARTED = """
    processes = [mp.get_context("{}").Process(target=work, args=(r, 2)) for r in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""
STARTS = {
    "mp.spawn": ("    mp.spawn(work, nprocs=2, args=(2,))\n", "mp.spawn(work, nprocs=2)"),
    "spawned": (_STARTED.format("spawn"), "calls init_process_group"),
    "forked": (_STARTED.format("fork"), "calls init_process_group"),
}


@pytest.mark.parametrize("how", STARTS)
@pytest.mark.core_cases(1)
def test_training_processes_of_the_scripts_own_are_refused(
    how: str, verify: Verify, own: Path
) -> None:
    start, told = STARTS[how]
    (own / "train.py").write_text(SPAWNING + start)
    done = verify("train.py")
    assert done.code == 2, done.out + done.err
    assert told in done.err
    assert "RANK" in done.err
    assert "EADDRINUSE" not in done.err
    assert is_untouched(own)


@confined
@pytest.mark.slow
def test_other_processes_are_held_back_too(verify: Verify, own: Path) -> None:
    helper = SPAWNING.split("if __name__")[0].replace(
        '    dist.init_process_group("gloo", rank=rank, world_size=world)\n', ""
    )
    (own / "train.py").write_text(
        helper
        + 'if __name__ == "__main__":\n'
        + _STARTED.format("spawn")
        + "    assert all(p.exitcode == 0 for p in processes)\n"
        + "    assert torch.load('model_best.pth.tar') == {}\n"
        + "    os.system('echo hello')\n"
    )
    done = verify("train.py")
    assert (done.code, done.verdicts) == (65, {1: "-", 2: "nothing to compare"}), done.err
    assert "other programs do, which the script has started: echo hello" in done.words
    assert is_untouched(own)


@pytest.mark.slow
def test_what_the_script_printed_explains_its_failure(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\n"
        "print('reading the options')\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('data')\n"
        "parser.parse_args()\n"
    )
    done = verify("train.py")
    assert done.code == 65
    assert "reading the options" in done.err
    assert "the following arguments are required: data" in done.err


def test_changes_are_told_by_size_and_time(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    before = files_below(tmp_path)
    (tmp_path / "a").write_text("aa")
    (tmp_path / "b").unlink()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d").write_text("d")
    names = [Path(path).name for path in changes(before, files_below(tmp_path))]
    assert names == ["a", "b", "d"]
