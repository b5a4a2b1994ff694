"""A script by itself: as one plain process, and under torchrun."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from torch import nn

from paceline.errors import UsageError
from paceline.script.session import _advice_for
from paceline.training.engine import Engine
from tests.script.scripts import (
    RUN,
    at_step,
    command,
    plain,
    summary,
    torchrun,
    write_script,
)
from tests.support.ports import free_port

pytestmark = pytest.mark.ranks
TERM = "os.kill(os.getpid(), signal.SIGTERM)"


def run_in(directory: str, more: str = "") -> str:
    return RUN.replace("session(", f"session(run_dir={directory!r}, {more}")


def test_a_plain_process_trains_stops_and_goes_on(tmp_path: Path) -> None:
    fault = at_step(9, 0, TERM)
    resumed = run_in("legs", 'resume="auto", ')
    whole = plain(write_script(tmp_path, run=run_in("whole"), name="whole.py"))
    assert whole.returncode == 0, whole.stderr
    script = write_script(tmp_path, fault, run=resumed)
    first = plain(script)
    assert first.returncode == 75, first.stderr
    assert "Resume from step 10" in first.stdout
    then = plain(script)
    assert then.returncode == 0, then.stderr
    one, two = summary(tmp_path / "whole"), summary(tmp_path / "legs")
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["recipe"] == "whole.py"
    assert two["samples_seen"] == 162


def test_a_finished_training_goes_on_with_more_epochs(tmp_path: Path) -> None:
    run = run_in("r", 'resume="auto", ')
    for epochs in (1, 2):
        more = run.replace("main(s)", f"main(s, {epochs})")
        done = plain(write_script(tmp_path, run=more))
        assert done.returncode == 0, done.stderr
        assert summary(tmp_path / "r")["epochs"] == epochs


SIGNALLED = """
import os, signal
def hook(s):
    if s.steps_done == 8:  # in the second epoch; steps are fast
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_one_worker_stops_after_the_step_in_which_a_signal_comes(tmp_path: Path) -> None:
    done = plain(write_script(tmp_path, SIGNALLED))
    assert done.returncode == 75, done.stderr
    assert "Resume from step 9" in done.stdout


ACCUMULATES = """
with paceline.session(device="cpu", run_dir="r", loader_workers=0) as s:
    data = points(64, 1)
    model = nn.Linear(5, 2)
    model, optimizer, train, test = s.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
        torch.utils.data.DataLoader(data, batch_size=8),
    )
    for epoch in s.epochs(1):
        for number, (x, y) in enumerate(train):
            s.backward(F.cross_entropy(model(x), y) / 4)
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        s.evaluate(lambda b: {"loss": F.cross_entropy(model(b[0]), b[1])}, test)
"""


@pytest.mark.xfail(strict=True, reason="steps are batches here; in the new core they are updates")
def test_steps_are_updates_and_have_the_loss_of_their_whole_batch(tmp_path: Path) -> None:
    done = plain(write_script(tmp_path, run=ACCUMULATES))
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "r")
    assert found["steps"] == 2
    assert found["train_loss"] == pytest.approx(found["val_loss"])  # nothing changes the weights


FORMATS = """
with paceline.session(device="cpu", loader_workers=0, run_dir="r") as s:
    data = TensorDataset(torch.randn(16, 3, 8, 8))
    layers = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(*layers)
    model, optimizer, train = s.prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
    )
    for epoch in s.epochs(1):
        for (images,) in train:
            s.step(model(images).mean())
    print("contiguous", [t.is_contiguous() for t in (images, layers[0].weight, layers[1].weight)])
"""


def test_a_scripts_memory_format_is_left_alone(tmp_path: Path) -> None:
    done = plain(write_script(tmp_path, run=FORMATS))
    assert done.returncode == 0, done.stderr
    assert "contiguous [True, True, False]" in done.stdout
    assert "fp32, channels-last" in done.stdout  # one of them


POOL = """
import multiprocessing
with paceline.session(device="cpu", loader_workers=0, run_dir="r") as s:
    main(s, epochs=1)
    with multiprocessing.Pool(2) as pool:
        print("squares", pool.map(abs, [-1, -2]))
"""


def test_a_pool_of_processes_behind_the_session_ends(tmp_path: Path) -> None:
    done = plain(write_script(tmp_path, run=POOL))
    assert done.returncode == 0, done.stderr
    assert "squares [1, 2]" in done.stdout


@pytest.mark.slow
def test_torchrun_trains_as_one_process_does(tmp_path: Path) -> None:
    """The same order and, but for BatchNorm and dropout on each worker, the same result."""
    script = write_script(tmp_path, run=run_in("r"))
    done = torchrun(script, 2)
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "r")
    assert (found["world_size"], found["steps"], found["samples_seen"]) == (2, 21, 162)
    assert done.stdout.count("Finished ") == 1
    assert done.stdout.count("epoch 0 accuracy") == 1


PRINTS = """
with paceline.session(device="cpu", loader_workers=0, run_dir="legs", resume="auto") as s:
    model = s.model(nn.Linear(5, 2))
    s.optimizer(torch.optim.SGD(model.parameters(), 0.1))
    batches = s.loader(points(54, 1), global_batch=8)
    for epoch in s.epochs(2):
        for inputs, targets in batches:
            hook(s)
            loss = F.cross_entropy(model(inputs), targets)
            s.step(loss)
        s.print(loss.item() + missing_below)
"""


def test_a_name_that_no_batch_was_left_to_set_is_explained(tmp_path: Path) -> None:
    script = write_script(tmp_path, at_step(6, 0, TERM), run=PRINTS)
    assert plain(script).returncode == 75
    resumed = plain(script)
    assert "name 'loss' is not defined" in resumed.stderr
    assert resumed.stderr.count("had nothing left to do. Give names") == 1
    # In an epoch with batches it is a mistake like any other.
    other = plain(write_script(tmp_path, run=PRINTS.replace("legs", "whole"), name="other.py"))
    assert "name 'missing_below' is not defined" in other.stderr
    assert "nothing left to do" not in other.stderr


def test_what_unwraps_a_model_as_behind_ddp_is_explained(tmp_path: Path) -> None:
    unwraps = PRINTS.replace("s.step(loss)", "s.step(loss); model.module.state_dict()")
    failed = plain(write_script(tmp_path, run=unwraps))
    assert failed.returncode == 1
    # Newer Pythons ask behind it whether `modules` is meant.
    assert "'Linear' object has no attribute 'module'" in failed.stderr
    assert "\nA model of the session" in failed.stderr


def test_only_what_the_session_explains_gets_advice() -> None:
    engine = cast(Engine, None)  # asked for names that aren't defined alone
    of_model = AttributeError("no module", name="module", obj=nn.Linear(1, 1))
    assert "A model of the session" in str(_advice_for(of_model, engine))
    assert _advice_for(AttributeError("no module", name="module", obj=object()), engine) is None
    assert _advice_for(UsageError("this process has a process group already"), engine) is None


OF_DDP = {
    "makes": ("dist.init_process_group('gloo')", "", 2),
    "wraps": ("nn.parallel.DistributedDataParallel(nn.Linear(5, 2))", "", 1),
    "ends": ("", "dist.destroy_process_group()", 2),
}


@pytest.mark.parametrize("what", OF_DDP)
def test_what_is_left_over_from_ddp_is_explained(what: str, tmp_path: Path) -> None:
    first, last, workers = OF_DDP[what]
    run = f"""
import torch.distributed as dist
with paceline.session(device="cpu", loader_workers=0, run_dir="run") as s:
    {first or "pass"}
    main(s, 1)
    {last}
"""
    script = write_script(tmp_path, run=run)
    for failed in [plain(script)] if workers == 1 else on_two(script):
        assert failed.returncode == 1
        assert "leave out init_process_group, DistributedDataParallel and destroy_" in failed.stderr


def on_two(script: Path) -> "list[subprocess.CompletedProcess[str]]":
    """Run a script on two workers that are started by hand."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor() as pool:
        done = [pool.submit(plain, script, RANK=rank, **where) for rank in ("0", "1")]
    return [future.result() for future in done]


FOLDS = """
import torch.distributed
from paceline.script import session
announced = session.announce_end
def announce_end(*given, **named):
    print("in the group" if torch.distributed.is_initialized() else "group left", flush=True)
    announced(*given, **named)
session.announce_end = announce_end
for fold in range(2):
    with paceline.session(device="cpu", loader_workers=0, run_dir=f"fold-{fold}") as s:
        main(s, 1)
"""


def test_sessions_by_hand_leave_each_other_before_rank_0_copies_and_reports(
    tmp_path: Path,
) -> None:
    first, second = on_two(write_script(tmp_path, run=FOLDS))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.count("group left") == 2
    assert "in the group" not in first.stdout
    assert [summary(tmp_path / f"fold-{fold}")["world_size"] for fold in (0, 1)] == [2, 2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("presission='bf16', ", "unknown option 'presission'. Did you mean 'precision'"),
        ("resume=True, ", "to resume"),
        ("run_dir='.', ", "is not empty and holds no training"),
    ],
)
def test_wrong_settings_are_told_and_nothing_is_left(
    more: str, message: str, tmp_path: Path
) -> None:
    run = RUN.replace("session(", f"session({more}")
    done = plain(write_script(tmp_path, run=run))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("paceline.errors.UsageError")
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_environment_counts_as_given(tmp_path: Path) -> None:
    run = run_in("r", 'precision="bf16", ')
    done = plain(write_script(tmp_path, run=run), PACELINE_PRECISION="fp16")
    assert "precision='bf16'" in done.stderr
    assert "--precision fp16" in done.stderr


def test_an_error_leaves_the_way_back(tmp_path: Path) -> None:
    script = write_script(tmp_path, at_step(9, 0, "raise KeyError('mine')"), run=run_in("r"))
    done = plain(script)
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "Resume from the newest good snapshot: paceline resume" in done.stderr
    assert (tmp_path / "r" / "logs" / "failure-rank-0.json").exists()


@pytest.mark.slow
def test_a_session_that_trains_nothing_leaves_nothing(tmp_path: Path) -> None:
    script = write_script(tmp_path, run=run_in("r").replace("main(s)", "s.print(s.rank)"))
    done = command([sys.executable, str(script)], tmp_path)
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_settings_of_the_training_cannot_change_on_resume(tmp_path: Path) -> None:
    script = write_script(tmp_path, at_step(9, 0, TERM), run=run_in("r"))
    assert plain(script).returncode == 75
    changed = run_in("r", 'resume=True, precision="bf16", ')
    done = plain(write_script(tmp_path, run=changed))
    assert done.returncode == 1
    assert "precision: the run has fp32, you give bf16" in done.stderr
