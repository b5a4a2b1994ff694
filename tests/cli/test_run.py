"""`paceline run`: a script of the user's own on several workers, stopped, failed, gone on with."""

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.cli.target import Target
from tests.cli.conftest import (
    Paceline,
    metrics_without_times,
    newest_step,
    summary,
    wait_for_step,
)
from tests.script.scripts import RUN, at_step, write_script

pytestmark = pytest.mark.ranks
TERM = "os.kill(os.getpid(), signal.SIGTERM)"


def in_process(directory: Path) -> Mapping[str, object]:
    content: Mapping[str, object] = json.loads((directory / "run.json").read_text())
    return content


@pytest.mark.slow
def test_stopped_inside_an_epoch_and_resumed_changes_no_bit(
    paceline: Paceline, tmp_path: Path
) -> None:
    write_script(tmp_path)
    write_script(tmp_path, at_step(9, 1, TERM), name="stopped")  # needs no .py
    whole = paceline.run("run", "own.py", "--workers", "2", "--run-dir", "whole")
    assert whole.code == 0, whole.err
    assert whole.out.count("epoch 0 accuracy") == 1
    first = paceline.run("run", "stopped", "--workers", "2", "--run-dir", "legs")
    assert first.code == 75, first.err
    assert "Resume from step 10: paceline resume" in first.out
    then = paceline.run("resume", "legs")
    assert then.code == 0, then.err
    assert "epoch 2, 3 of 7 steps done" in then.out
    one, two = summary(tmp_path / "whole"), summary(tmp_path / "legs")
    for name in ("weights_sha256", "samples_seen", "steps", "best_val_accuracy", "train_loss"):
        assert one[name] == two[name], name
    assert metrics_without_times(tmp_path / "whole") == metrics_without_times(tmp_path / "legs")
    assert metrics_without_times(tmp_path / "legs")[0][-3:] == ["rate", "seen", "noise"]
    assert (tmp_path / "legs" / "report.html").exists()


@pytest.mark.slow
def test_a_killed_worker_is_started_again(paceline: Paceline, tmp_path: Path) -> None:
    write_script(tmp_path)
    write_script(tmp_path, at_step(9, 1, "os.kill(os.getpid(), signal.SIGKILL)"), name="killed.py")
    whole = paceline.run("run", "own.py", "--workers", "2", "--run-dir", "whole")
    options = ("--run-dir", "killed", "--snapshot-every-steps", "3")
    done = paceline.run("run", "killed.py", "--workers", "2", *options)
    assert (whole.code, done.code) == (0, 0), done.err
    assert "killed by SIGKILL" in done.err + done.out
    assert (tmp_path / "happened").exists()
    one, two = summary(tmp_path / "whole"), summary(tmp_path / "killed")
    assert one["weights_sha256"] == two["weights_sha256"]
    assert two["restarts"] == 1, done.err


_COMPILED = """
import os
import re
import signal
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset
import paceline

torch.manual_seed(0)
inputs = torch.randn(64, 5)
with paceline.session(compile=True, device="cpu", loader_workers=0) as s:
    model = s.model(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = s.loader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), global_batch=16)
    for epoch in s.epochs(2):
        for x, y in batches:
            if s.steps_done == 5 and not os.path.exists("happened"):
                open("happened", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            s.step(nn.functional.cross_entropy(model(x), y))
    found = counters["aot_autograd"]
    s.print("compiled", found["autograd_cache_miss"], "found", found["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_a_restart_compiles_nothing_again_and_has_the_same_bits(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(_COMPILED)
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_VEC_ISA_OK": "0"}
    killed = paceline.run("run", "own.py", "--workers", "1", "--run-dir", "killed", env=cache)
    assert killed.code == 0, killed.err
    whole = paceline.run("run", "own.py", "--workers", "1", "--run-dir", "whole", env=cache)
    one, two = summary(tmp_path / "whole"), summary(tmp_path / "killed")
    assert two["restarts"] == 1, killed.err
    assert one["weights_sha256"] == two["weights_sha256"]
    for done in (killed, whole):
        compiled, found = re.findall(r"compiled (\d+) found (\d+)", done.out)[-1]
        assert compiled == "0"
        assert int(found) > 0


_LONG_STEPS = """
import time
import torch
import paceline

s = paceline.session()
model = s.model(torch.nn.Linear(2, 1))
s.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for step in s.steps(20):
    time.sleep(5)  # longer than workers have to stop where steps are short
    s.step(model(torch.ones(3, 2)).mean())
"""


@pytest.mark.slow
def test_a_step_that_is_under_way_is_finished_and_saved_however_long_it_takes(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(_LONG_STEPS)
    options = ("--workers", "1", "--snapshot-every-steps", "1", "--run-dir", "run")
    process = paceline.start("run", "own.py", *options)
    wait_for_step(tmp_path / "run", 1)
    process.send_signal(signal.SIGINT)
    done = paceline.finish(process)
    assert (done.code, "did not stop in time" in done.err) == (75, False)
    assert "Finishing the step and writing a snapshot, up to 1" in done.err  # some 13 s
    assert newest_step(tmp_path / "run") == summary(tmp_path / "run")["steps"]


@pytest.mark.slow
def test_resumed_on_another_number_of_workers(paceline: Paceline, tmp_path: Path) -> None:
    write_script(tmp_path, at_step(9, 1, TERM))
    assert paceline.run("run", "own.py", "--workers", "2", "--run-dir", "r").code == 75
    then = paceline.run("resume", "r", "--workers", "1")
    assert then.code == 0, then.err
    found = summary(tmp_path / "r")
    assert (found["steps"], found["samples_seen"], found["world_size"]) == (21, 162, 1)


@pytest.mark.slow
def test_errors_of_the_script_are_shown_as_python_shows_them(
    paceline: Paceline, tmp_path: Path
) -> None:
    write_script(tmp_path, at_step(9, 1, "raise KeyError('mine')"))
    done = paceline.run("run", "own.py", "--workers", "2", "--run-dir", "r")
    assert done.code == 65
    shown = done.err[done.err.index("Traceback") : done.err.index("KeyError: 'mine'")]
    assert "in main" in shown
    assert "in hook" in shown
    assert "paceline" not in shown.replace(str(tmp_path), "")
    write_script(tmp_path, "sys.exit(3)", name="exits.py")
    done = paceline.run("run", "exits.py", "--workers", "1", "--run-dir", "e")
    assert done.code == 65
    assert "the script ended itself by sys.exit(3)" in done.err
    assert not (tmp_path / "e").exists()


BY_HAND = """
import torch.distributed as dist

dist.init_process_group("gloo")
print(dist.get_world_size(), "met")
dist.barrier()  # nobody leaves while another still connects
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_workers_that_each_ran_the_whole_script_are_told_of(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "alone.py").write_text("print('trains')")
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    done = paceline.run("run", "alone.py", "--workers", "2")
    assert (done.code, done.out) == (0, "trains\n")
    assert "each of the 2 workers ran all of it on its own" in done.err
    assert done.err.count("\n") == 1
    for words in (("alone.py", "--workers", "1"), ("by_hand.py", "--workers", "2")):
        done = paceline.run("run", *words)
        assert (done.code, done.err) == (0, ""), done.err


@pytest.mark.slow
def test_the_scripts_own_arguments(paceline: Paceline, tmp_path: Path) -> None:
    own = RUN.replace("main(s)", "main(s, epochs=int(sys.argv[1]))")
    write_script(tmp_path, run=own)
    done = paceline.run("run", "own.py", "--workers", "1", "--run-dir", "r", "--", "2")
    assert done.code == 0, done.err
    assert summary(tmp_path / "r")["epochs"] == 2
    assert in_process(tmp_path / "r")["script_args"] == ["2"]
    again = paceline.run("resume", "r")  # the same arguments: nothing is left to do
    assert again.code == 0, again.err
    assert summary(tmp_path / "r")["epochs"] == 2


def session_with(options: str) -> str:
    return RUN.replace("loader_workers=0", options)


WRONG = {
    "precision": (session_with('precision="bf16"'), ["--precision", "fp16"], "--precision fp16"),
    "run_dir": (session_with('run_dir="other"'), [], "it was started with the run directory"),
    "unknown": (
        session_with("presision=1"),
        [],
        "unknown option 'presision'. Did you mean 'precision'?",
    ),
}


def test_a_run_directory_that_the_script_names(paceline: Paceline, tmp_path: Path) -> None:
    own = session_with("loader_workers=0, run_dir='runs/mine', resume=sys.argv[1] == 'yes'")
    write_script(tmp_path, run=own.replace("main(s)", "main(s, epochs=1)"))
    words = ("run", "own.py", "--workers", "2", "--")
    none = paceline.run(*words, "yes")
    assert none.code == 2
    assert "there is no training in" in none.err
    assert not (tmp_path / "runs").exists()
    first = paceline.run(*words, "no")
    assert first.code == 0, first.err
    assert first.out.count("epoch 0 accuracy") == 1
    assert [run.name for run in (tmp_path / "runs").iterdir()] == ["mine"]
    assert "epoch 0 accuracy" in (tmp_path / "runs" / "mine" / "logs" / "rank-0.log").read_text()
    assert summary(tmp_path / "runs" / "mine")["steps"] == 7
    second = paceline.run(*words, "no")
    assert second.code == 2
    assert "already holds a training" in second.err
    assert paceline.run(*words, "yes").code == 0


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.core_cases(2)
def test_contradictions_name_both_sides(wrong: str, paceline: Paceline, tmp_path: Path) -> None:
    run, options, message = WRONG[wrong]
    write_script(tmp_path, run=run)
    done = paceline.run("run", "own.py", "--workers", "1", "--run-dir", "r", *options)
    assert done.code == 2
    assert message in done.err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the script is missing"),
        (("-m", "package.module"), "started by `torchrun --nproc-per-node 2 -m PACKAGE.MODULE"),
        (("nowhere.py",), "there is no file nowhere.py"),
        (("--workers", "2"), "the script is missing"),
        (("--workers", "2", "-"), "can't come from standard input"),
        (("nowhere", "--workers", "2"), "there is no file nowhere. Usage: paceline run SCRIPT.py"),
        ((".",), ". is a directory"),
        (("job.toml",), "job.toml is a file of settings, not a script: give it after --config"),
        (("digits",), "digits is a recipe, not a script: paceline train digits trains it"),
        (("a.py:build",), "a.py:build is a recipe, not a script: paceline train a.py:build"),
        (("own.py", "--optimizer", "adam"), "--optimizer"),
    ],
)
def test_usage(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_script(tmp_path)
    write_script(tmp_path, name="script")
    (tmp_path / "job.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words]) == 2
    assert message in capsys.readouterr().err


_ONE_EPOCH = """
import sys
import torch
import paceline

with paceline.session() as s:
    model = s.model(torch.nn.Linear(2, 1))
    optimizer = s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = s.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch=4)
    for _ in s.epochs(1):
        for (inputs,) in batches:
            s.step(model(inputs).mean())
"""


@pytest.mark.slow
def test_a_runs_own_file_names_its_script(
    paceline: Paceline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.py").write_text(_ONE_EPOCH)
    options = ("--device", "cpu", "--workers", "1", "--run-dir")
    first = paceline.run("run", "one.py", *options, "first", "--seed", "3", "--", "--size", "5")
    again = paceline.run("run", "--config", "first/run.json", *options, "again")
    assert (first.code, again.code) == (0, 0), again.err
    hashes = [summary(tmp_path / name)["weights_sha256"] for name in ("first", "again")]
    assert hashes[0] == hashes[1]
    records = [in_process(tmp_path / name) for name in ("first", "again")]
    for name in ("reference", "script_args"):
        assert records[0][name] == records[1][name], name
    assert records[1]["script_args"] == ["--size", "5"]
    # Arguments on the command line count instead; no other command takes the file for its own.
    assert main(["run", "--config", "first/run.json", "--print-config", "--", "--size", "6"]) == 0
    assert "seed = 3" in capsys.readouterr().out
    assert main(["train", "--config", "first/run.json"]) == 2
    assert "paceline run --config first/run.json runs it again" in capsys.readouterr().err
    # Commands that try a training do so with the same script and arguments.
    named = Target.read(["--config", "first/run.json"], "", "")
    assert (named.name, named.script_args) == (str(tmp_path / "one.py"), ("--size", "5"))
    assert Target.read(["--config", "first/run.json", "--"], "", "").script_args == ()
    assert Target.read(["two.py", "--config", "first/run.json"], "", "").script_args == ()
    verified = paceline.run("verify", "--config", "first/run.json", "--steps", "2")
    assert verified.code == 0, verified.err
    assert "the same training on 1 and 2 workers, bit for bit" in verified.out
    (tmp_path / "one.py").unlink()
    for command in ("run", "scale", "verify"):
        assert main([command, "--config", "first/run.json"]) == 2
        assert "one.py, the script of first/run.json" in capsys.readouterr().err, command
    recipe = {"kind": "recipe", "recipe": "digits", "settings": {}, "recipe_arguments": {}}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert main(["run", "--config", "recipe.json"]) == 2
    assert "paceline train --config recipe.json trains it" in capsys.readouterr().err
