"""Workers that were started for different trainings, or go on with other numbers: told at once."""

import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from tests.cli.conftest import Finished, Paceline, summary
from tests.support.ports import free_port

pytestmark = pytest.mark.ranks

RECIPE = '''
import paceline
from paceline.recipes.digits import digits

@paceline.recipe(epochs=1, global_batch=64)
def build(*, dropout: float = {dropout}) -> paceline.Job:
    """Train digits."""
    return digits.build(dropout=dropout)
'''
SCRIPT = """
import sys, torch, paceline
from torch.utils.data import TensorDataset

with paceline.session(progress="off") as s:
    if "--odd-model" in sys.argv and s.rank:
        model = s.model(torch.nn.Linear(3, 1))
    else:
        model = s.model(torch.nn.Linear(2, 1))
    optimizer = s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = s.loader(TensorDataset(torch.zeros(32, 2)), global_batch=8)
    for epoch in s.epochs(1):
        for x in batches:
            if "--drift" in sys.argv and s.rank and s.engine.context.progress.state.step == 2:
                with torch.no_grad():
                    model.weight[0, 1].add_(1e-3)
            s.step(model(x[0]).square().mean())
"""


def two(paceline: Paceline, *commands: list[str | Path]) -> tuple[Finished, Finished]:
    """Start two workers by hand, each with a command of its own, and wait for both."""
    port = free_port()
    started = []
    for rank, command in enumerate(commands):
        what, *options = command
        own = ("--init-method", f"tcp://127.0.0.1:{port}", "--world-size", "2", "--rank", str(rank))
        words = ("train", what, *own, "--local-rank", str(rank), "--threads", "1", *options)
        started.append(paceline.start(*words))
    first, second = [paceline.finish(process) for process in started]
    return first, second


def test_options_that_differ_are_named_by_both(paceline: Paceline) -> None:
    first, second = two(
        paceline, ["digits", "--epochs", "1"], ["digits", "--epochs", "1", "--lr", "0.02"]
    )
    for done in (first, second):
        assert done.code == ExitCode.JOB, done.err
        assert "rank 1 on " in done.err
        assert "has lr 0.02, rank 0 on " in done.err
        assert "has 0.05" in done.err
    assert not list((paceline.directory / "runs").glob("*"))  # nothing was begun


@pytest.mark.slow
def test_a_place_for_copies_that_is_refused_is_known_to_both(paceline: Paceline) -> None:
    (paceline.directory / "taken").touch()
    copies = ["--run-dir", "run", "--copy-to", f"file://{paceline.directory}/taken"]  # a file
    first, second = two(paceline, ["digits", *copies], ["digits", *copies])
    for done in (first, second):
        assert done.code == first.code != 0, done.err
        assert done.err.startswith("paceline: --copy-to: "), done.err
    assert not (paceline.directory / "run").exists()


@pytest.mark.slow
def test_recipes_that_differ_are_named_by_both(paceline: Paceline) -> None:
    for rank in range(2):
        own = paceline.directory / f"node{rank}"
        own.mkdir()
        (own / "mine.py").write_text(RECIPE.format(dropout=f"0.{rank}"))
    recipes = [paceline.directory / f"node{rank}" / "mine.py" for rank in range(2)]
    first, second = two(paceline, [f"{recipes[0]}:build"], [f"{recipes[1]}:build"])
    for done in (first, second):
        assert done.code == ExitCode.JOB, done.err
        assert "has mine.py with SHA-256 " in done.err
        assert "has dropout 0.1, rank 0 on " in done.err


@pytest.mark.slow
def test_the_same_recipe_at_two_places_is_the_same(paceline: Paceline) -> None:
    recipes = []
    for rank in range(2):
        own = paceline.directory / f"node{rank}"
        own.mkdir()
        recipes.append(own / "mine.py")
        recipes[-1].write_text(RECIPE.format(dropout="0.1"))
    first, second = two(paceline, [f"{recipes[0]}:build"], [f"{recipes[1]}:build"])
    assert (first.code, second.code) == (0, 0), first.err + second.err


def run_script(paceline: Paceline, *arguments: str) -> Finished:
    script = paceline.directory / "mine.py"
    script.write_text(SCRIPT)
    own = ("--workers", "2", "--threads", "1", "--run-dir", "run", "--check-every", "3")
    return paceline.run("run", *own, script, "--", *arguments)


@pytest.mark.slow
def test_a_worker_that_drifts_is_named(paceline: Paceline) -> None:
    assert run_script(paceline).code == 0
    shutil.rmtree(paceline.directory / "run")  # for another
    done = run_script(paceline, "--drift")
    assert done.code == ExitCode.JOB, done.err
    assert "after step 3 rank 0 on " in done.err
    assert "have drifted from each other: weight" in done.err


def test_another_model_on_one_rank_is_named_with_its_host(paceline: Paceline) -> None:
    done = run_script(paceline, "--odd-model")
    assert done.code == ExitCode.JOB, done.err
    assert f"rank 1 on {os.uname().nodename} differ: weight (1, 2)" in done.err


@pytest.mark.slow
def test_going_on_with_other_numbers(paceline: Paceline) -> None:
    """Other instructions of the CPU give other bits: refused, unless it is allowed."""
    run = paceline.directory / "run"
    common = ("--shards", "2", "--workers", "1", "--epochs", "1", "--run-dir", run)
    done = paceline.run("train", "digits", *common)
    assert done.code == 0, done.err
    again = ("resume", run, "--epochs", "2", "--allow-change", "epochs")
    plain = {"ATEN_CPU_CAPABILITY": "default"}
    refused = paceline.run(*again, env=plain)
    assert refused.code == ExitCode.JOB, refused.err
    assert "ATEN_CPU_CAPABILITY: was not set, is default" in refused.err
    allowed = paceline.run(*again, "--allow-different-hardware", env=plain)
    assert allowed.code == 0, allowed.err
    assert "ATEN_CPU_CAPABILITY: was not set, is default" in allowed.out + allowed.err
    assert summary(run)["epochs"] == 2
