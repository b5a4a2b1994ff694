"""Scripts in others' idioms, made Paceline's: the same on 1 and 2 workers, exact after a kill."""

import csv
import importlib
import json
import os
import signal
import sys
from functools import cached_property
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch import Size, Tensor

from tests.cli.conftest import Paceline, metrics_without_times, newest_step, summary
from tests.docs.pages import ROOT
from tests.launch.waiting import patient, until
from tests.script.idioms.idioms import BY_NAME, HERE, IDIOMS, Idiom, count_changes
from tests.support.diffs import apply_diff
from tests.support.idx_files import write_mnist
from tests.support.warm import run_warm

QUICK = ("siamese", "multigpu")
"""What is tried in the core of the tests."""
KILLED = ("dcgan", "imagenet", "nanogpt", "word_language_model", "vae", "siamese")
"""What is killed and resumed: several models, schedulers, gradients added up, state of a loop, and
losses of the script's own."""
USUAL = "--threads 1 --loader-workers 0 --progress off".split()
PAUSE = """
import os as _os, signal as _signal
from paceline.training import status_exchange as _exchange
from paceline.training.session import Session as _Session

_exchange._EVERY_S = 0.0
_backward = _Session.backward
_step = _Session.step


def _pausing(work):
    def at_step(self, *given, **named):
        if self.rank == 1 and self.steps_done == {step} and not _os.path.exists("paused"):
            open("paused", "w").close()
            while True:
                _signal.pause()
        return work(self, *given, **named)
    return at_step


_Session.backward, _Session.step = _pausing(_backward), _pausing(_step)
"""
"""Goes before a script's first line: rank 1 stays in a step of the first start for ever."""


class Runs:
    """The trainings of one script, each done once."""

    def __init__(self, idiom: Idiom, place: Path) -> None:
        self.idiom = idiom
        self._place = place

    @cached_property
    def alone(self) -> Path:
        return self.train("alone", 1, *self.idiom.options)

    @cached_property
    def on_two(self) -> Path:
        return self.train("on-two", 2, *self.idiom.options)

    def train(self, name: str, workers: int, *options: str) -> Path:
        """Train the later script to its end. Gives the run directory."""
        command = Paceline(self.directory(name))
        done = command.run(*words(self.idiom, self.idiom.after, workers, *options))
        assert done.code == 0, done.out + done.err
        return command.directory / "run"

    def directory(self, name: str) -> Path:
        """Make a working directory, with what the script reads."""
        made = self._place / name
        made.mkdir()
        if self.idiom.name == "mnist":
            write_mnist(made / "data", train=500, test=100, gz=False)
        return made


def words(idiom: Idiom, script: Path, workers: int, *options: str) -> list[str | Path]:
    usual = ("--workers", str(workers), "--run-dir", "run", *USUAL, "--device", "cpu")
    return ["run", script, *usual, *options, "--", *idiom.arguments]


def each(*names: str, core: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Give a test one case for each of these scripts, all of a script on one process of xdist."""
    cases = []
    for name in names:
        tier = () if name in core else (pytest.mark.slow,)
        cases.append(pytest.param(name, marks=[pytest.mark.xdist_group(f"idiom-{name}"), *tier]))
    return pytest.mark.parametrize("runs", cases, indirect=True)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have scripts that take a GPU where there is one train where they are compared."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    return {n: Runs(idiom, tmp_path_factory.mktemp(n)) for n, idiom in BY_NAME.items()}


@pytest.fixture
def runs(request: pytest.FixtureRequest, all_runs: dict[str, Runs]) -> Runs:
    if "torchvision" in all_runs[request.param].idiom.before.read_text():
        importlib.import_module("torchvision")  # once, rather than in each forked process
    return all_runs[request.param]


def weights(run: Path) -> dict[str, Tensor]:
    """Read the models of a run's last snapshot."""
    tensors = load_file(last(run) / "tensors.safetensors")
    return {name: t for name, t in tensors.items() if name.partition("/")[0].startswith("model")}


def last(run: Path) -> Path:
    return run / "snapshots" / f"step-{newest_step(run):012}"


def kept(run: Path) -> dict[str, object]:
    """Read what a script keeps beside models and optimizers, with each worker's own."""
    state = json.loads((last(run) / "state.json").read_text())
    return {"others": state["others"], "own": state["own"], "optimizers": state["optimizers"]}


def part(named: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}


def shapes(named: dict[str, Tensor]) -> dict[str, Size]:
    return {name: tensor.shape for name, tensor in named.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    assert one
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file)]


NAMES = tuple(BY_NAME)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_as_many_lines_change_as_the_docs_say(idiom: Idiom) -> None:
    assert count_changes(idiom.before, idiom.after) == (idiom.new, idiom.gone)
    assert idiom.row() in (ROOT / "docs" / "tutorial" / "own-loop.md").read_text().splitlines()


@pytest.mark.parametrize("line", [" kept", "-gone"])
def test_a_diff_that_does_not_fit_is_refused(line: str) -> None:
    assert apply_diff("a\nb\nc\n", "---\n+++\n@@ -2 +2,2 @@\n b\n+new\n") == "a\nb\nnew\nc\n"
    with pytest.raises(ValueError, match="line 2 isn't"):
        apply_diff("a\nb\n", f"---\n+++\n@@ -2 +2 @@\n{line}\n")


def test_every_script_is_in_the_table() -> None:
    assert sorted(path.name for path in HERE.glob("*_before.py")) == sorted(
        idiom.before.name for idiom in IDIOMS
    )


@pytest.mark.slow
@pytest.mark.ranks
@each(*NAMES)
def test_one_process_trains_as_plain_pytorch_does(runs: Runs) -> None:
    """With the same samples in the same order, and the same random numbers of each step."""
    idiom, place = runs.idiom, runs.directory("plain")
    before, after = (place / path.name for path in (idiom.before, idiom.after))
    for path, copy in ((idiom.before, before), (idiom.after, after)):
        copy.write_text(path.read_text().replace(*idiom.without_noise))
    words = [sys.executable, "-m", "tests.script.idioms.plainly", "plain.safetensors", str(before)]
    process = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_warm([*words, *idiom.arguments], place, PYTHONPATH=str(ROOT), **process)
    assert done.returncode == 0, done.stderr
    ours = {"PACELINE_DEVICE": "cpu", "PACELINE_LOADER_WORKERS": "0", "PACELINE_THREADS": "1"}
    ours["PACELINE_MEMORY_FORMAT"] = "contiguous"  # dropout draws in the order of memory
    done = run_warm([sys.executable, str(after), *idiom.arguments], place, **ours)
    assert done.returncode == 0, done.stderr
    (run,) = (place / "runs").iterdir()
    plain, found = load_file(place / "plain.safetensors"), weights(run)
    models = [part(found, name) for name in idiom.models]
    for name in {name.partition("/")[0] for name in plain}:
        wanted = part(plain, name + "/")
        (model,) = (m for m in models if shapes(m) == shapes(wanted))
        assert distance(model, wanted) <= idiom.plain_within


@pytest.mark.ranks
@each(*NAMES, core=QUICK)
@pytest.mark.core_cases(1)
def test_two_workers_train_as_one_does(runs: Runs) -> None:
    idiom, alone, two = runs.idiom, runs.alone, runs.on_two
    for name in ("steps", "samples_seen"):
        assert summary(alone)[name] == summary(two)[name]
    assert summary(two)["world_size"] == 2
    if idiom.within is not None:
        assert distance(weights(alone), weights(two)) <= idiom.within
    else:
        assert losses(two) == pytest.approx(losses(alone), rel=idiom.loss_within)


@pytest.mark.slow
@pytest.mark.ranks
@each(*(idiom.name for idiom in IDIOMS if idiom.shards))
def test_shards_have_the_same_bits(runs: Runs) -> None:
    one = runs.train("shards-on-one", 1, "--shards", "2")
    two = runs.train("shards-on-two", 2, "--shards", "2")
    for name in ("weights_sha256", "state_sha256", "steps"):
        assert summary(one)[name] == summary(two)[name]
    assert kept(one) == kept(two)
    assert metrics_without_times(one) == metrics_without_times(two)


@pytest.mark.slow
@pytest.mark.ranks
@each(*KILLED)
def test_a_killed_training_goes_on_exactly(runs: Runs) -> None:
    idiom, undisturbed = runs.idiom, runs.on_two
    place = runs.directory("killed")
    script, step = place / idiom.after.name, int(str(summary(undisturbed)["steps"])) // 2
    script.write_text(PAUSE.format(step=step) + idiom.after.read_text())
    command = Paceline(place)
    process = command.start(*words(idiom, script, 2, *idiom.options, "--snapshot-every-steps", "2"))
    try:
        until(lambda: (place / "paused").exists() or process.poll() is not None)
        until(lambda: newest_step(place / "run") > 0 or process.poll() is not None)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        _, alive = psutil.wait_procs(family, timeout=patient(60))
        assert not alive
    finally:
        command.end()
    assert 0 < newest_step(place / "run") <= step
    done = command.run("resume", place / "run")
    assert done.code == 0, done.out + done.err
    run = place / "run"
    for name in ("weights_sha256", "state_sha256", "steps", "samples_seen"):
        assert summary(run)[name] == summary(undisturbed)[name]
    assert kept(run) == kept(undisturbed)
    assert idiom.kept is None or idiom.kept in json.dumps(kept(run))
    assert metrics_without_times(run) == metrics_without_times(undisturbed)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", ["mnist", "vae", "dcgan", "imagenet", "nanogpt"])
def test_verify_says_whether_it_is_the_same(name: str, tmp_path: Path) -> None:
    idiom = BY_NAME[name]
    if idiom.name == "mnist":
        write_mnist(tmp_path / "data", train=500, test=100, gz=False)
    assert verified(idiom.after, tmp_path, *idiom.options) == (idiom.verdict, [*idiom.causes])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "state", "options", "found"),
    [
        ("dcgan", "after", ("--sync-batchnorm",), ("same but for chance", ["chance"])),
        ("multigpu", "before", (), ("different", ["rate-stays"])),
        ("imagenet", "before", (), ("different", ["no-communication"])),
    ],
)
def test_verify_says_what_is_wrong(
    name: str,
    state: str,
    options: tuple[str, ...],
    found: tuple[str, list[str]],
    tmp_path: Path,
) -> None:
    script = BY_NAME[name].after if state == "after" else BY_NAME[name].before
    assert verified(script, tmp_path, *options) == found


def verified(script: Path, place: Path, *options: str) -> tuple[str, list[str]]:
    """Verify a script for three steps. Gives the verdict on two workers and the causes found."""
    (place / script.name).write_text(script.read_text())
    (place / "checkpoint.pth.tar").write_text("the user's own")
    before = {path.name for path in place.iterdir()}
    quick = ("--threads", "1", "--steps", "3", "--json", "found.json")
    done = Paceline(place).run("verify", script.name, *quick, *options)
    result = json.loads((place / "found.json").read_text())
    verdict = result["compared"][1]["verdict"]
    assert done.code == (65 if verdict == "different" else 0), done.out + done.err
    assert (place / "checkpoint.pth.tar").read_text() == "the user's own"
    assert {path.name for path in place.iterdir()} == before | {"found.json"}
    return verdict, [finding["cause"] for finding in result["findings"]]
