"""A script runs as Python's main program: a file, or a module by its name."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.script.entry import _run_as_main
from tests.script.scripts import command
from tests.script.test_verified import REQUEST

TELLS = """
import json, sys
if __name__ == "__main__":
    with open("told.json", "w") as file:
        json.dump([sys.argv, sys.path[0], __package__], file)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_file_and_a_module(
    is_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    folder = tmp_path / "paceline_entry_pkg"
    folder.mkdir()
    file = folder / "train.py"
    file.write_text(TELLS)
    reference = "paceline_entry_pkg.train" if is_module else str(file)
    _run_as_main(replace(REQUEST, reference=reference, script_args=("--lr", "1")))
    sys.modules.pop(folder.name, None)
    argv, place, package = json.loads((tmp_path / "told.json").read_text())
    assert argv[1:] == ["--lr", "1"]
    assert Path(place) == (tmp_path if is_module else folder)
    assert package == (folder.name if is_module else "")


DRAWS = """
import json, random, sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split
import paceline

names = [str(number) for number in range(40)]
random.shuffle(names)
letters = list({chr(97 + number) * 3 for number in range(20)})
picked = np.random.permutation(20).tolist()
part, _ = random_split(TensorDataset(torch.arange(40).float()[:, None]), [30, 10])
model = nn.Linear(1, 1)
with paceline.session(device="cpu", loader_workers=0) as s:
    attempt = len(list(Path(".").glob("drawn-*"))) // s.world_size
    drawn = [names, letters, picked, part.indices, model.weight.item()]
    s.barrier()
    Path(f"drawn-{attempt}-{s.rank}.json").write_text(json.dumps(drawn))
    model = s.model(model)
    s.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    batches = s.loader(part, global_batch=10)
    for epoch in s.epochs(2):
        for x, in batches:
            s.step(model(x).square().mean())
        if epoch == 0 and attempt == 0 and s.rank == 0:
            import os, signal
            os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_what_is_drawn_before_the_session_is_the_same_on_all_workers_and_once_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "draws.py").write_text(DRAWS)
    paceline = [sys.executable, "-m", "paceline"]
    words = ["run", "draws.py", "--workers", "2", "--run-dir", "r", "--seed", "3"]
    done = command([*paceline, *words], tmp_path)
    assert done.returncode == 75, done.stderr
    resumed = command([*paceline, "resume", "r"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    drawn = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("drawn-*"))]
    assert len(drawn) == 4
    assert all(each == drawn[0] for each in drawn)
    # The same command gives the same weights: nothing to warn of.
    assert "without a seed" not in done.stdout + done.stderr
    assert json.loads((tmp_path / "r" / "run.json").read_text())["derived"]["unseeded_models"] == []


@pytest.mark.slow
@pytest.mark.parametrize("opens", [False, True])
def test_workers_that_have_run_apart_are_told_and_not_those_of_a_session(
    opens: bool, tmp_path: Path
) -> None:
    text = "import paceline\ns = paceline.session(device='cpu')\nprint(s.sum(1))"
    (tmp_path / "script.py").write_text(text if opens else "print(1)")
    done = command(
        [sys.executable, "-m", "paceline", "run", "script.py", "--workers", "2"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert ("opened no paceline.session()" in done.stdout + done.stderr) is not opens


SPAWNS = """
import os, socket
import torch.distributed as dist, torch.multiprocessing as mp

def work(rank, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    dist.init_process_group("gloo", rank=rank, world_size=2)
    os.write(1, f"met {dist.get_world_size()}\\n".encode())  # at once, unlike print
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as free:  # bound, not listening: no other process is given its port
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("localhost", 0))
        START(work, (str(free.getsockname()[1]),), nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["mp.spawn", "mp.start_processes"])
def test_a_script_that_spawns_its_workers_is_told_and_they_meet(start: str, tmp_path: Path) -> None:
    text = SPAWNS.replace("START(", f"{start}(")
    if start != "mp.spawn":
        text = text.replace("nprocs=2", "nprocs=2, start_method='spawn'")
    (tmp_path / "spawns.py").write_text(text)
    done = command(
        [sys.executable, "-m", "paceline", "run", "spawns.py", "--workers", "1"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("met 2") == 2
    said = "".join((done.stdout + done.stderr).split())  # lines may be broken anywhere
    assert f"startitby`python{tmp_path / 'spawns.py'}`" in said
