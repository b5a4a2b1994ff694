"""What a verified script writes, and the processes it starts, by the real command."""

from pathlib import Path

import pytest

from tests.verify.conftest import Verify
from tests.verify.faults.scripts import BY_HAND

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("verify")]

SAVING = BY_HAND.replace(
    "dist.destroy_process_group()",
    """
    if rank == 0:
        torch.save({"epoch": epoch}, "best.pt")
        print("saved in", __file__)
    dist.barrier()
    assert torch.load("best.pt") == {"epoch": epoch}
open(OUTSIDE, "w") if OUTSIDE else None
dist.destroy_process_group()
""",
)


@pytest.mark.parametrize("is_outside", [False, True])
def test_a_script_writes_into_a_copy(verify: Verify, tmp_path: Path, is_outside: bool) -> None:
    outside = str(tmp_path / "outside.txt") if is_outside else ""
    (tmp_path / "train.py").write_text(SAVING.replace("OUTSIDE", repr(outside)))
    (tmp_path / "best.pt").write_text("of a real training")
    before = {path.name for path in tmp_path.iterdir()}
    done = verify("train.py", "--tolerance", "1e-4")
    assert done.code == (65 if is_outside else 0), done.out + done.err
    assert {path.name for path in tmp_path.iterdir()} == before
    assert (tmp_path / "best.pt").read_text() == "of a real training"
    if is_outside:
        assert f"the script writes {outside}" in done.words
        assert f"--writable {tmp_path}" in done.err
        assert f'File "{tmp_path / "train.py"}"' in done.err


STARTING = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, world):
    torch.save({}, "checkpoint.pt")
    if len(sys.argv) > 1:
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=world)


if __name__ == "__main__":
"""


@pytest.mark.core_cases(1)
def test_another_number_of_spawned_processes_is_refused(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STARTING + "    mp.spawn(work, nprocs=3, args=(3,))\n")
    done = verify("train.py")
    assert done.code == 2, done.out + done.err
    assert "mp.spawn(work, nprocs=3)" in done.err
    assert "RANK" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_work_in_the_copy_too(verify: Verify, tmp_path: Path, method: str) -> None:
    (tmp_path / "train.py").write_text(
        STARTING
        + f"    process = mp.get_context('{method}').Process(target=work, args=(0, 1))\n"
        + "    process.start()\n    process.join()\n    assert process.exitcode == 0\n"
        + "    assert torch.load('checkpoint.pt') == {}\n    os.system('echo hello')\n"
    )
    done = verify("train.py", "--", "only save")
    assert (done.code, done.verdicts) == (65, {1: "-", 2: "nothing to compare"}), done.err
    assert "by multiprocessing; echo hello" in done.words
    assert not (tmp_path / "checkpoint.pt").exists()


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
