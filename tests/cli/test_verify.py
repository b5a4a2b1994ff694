"""`paceline verify` on recipes and on scripts with a session; its usage, and what it leaves."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.cli.commands import verify as verify_command
from paceline.errors import ExitCode
from paceline.report.verification import render_verification
from paceline.verify.compare import given_limits
from paceline.verify.launches import VerifyRequest
from paceline.verify.text_report import counts_report
from paceline.verify.verdict import evaluate_first, evaluate_launch
from tests.cli.conftest import Paceline
from tests.script.scripts import RUN, write_script
from tests.verify.made import launch, trained

QUICK = ("--threads", "1", "--json", "found.json")
STRICT = RUN.replace("loader_workers=0", 'loader_workers=0, run_dir="kept", resume="auto"')


def verdicts(directory: Path) -> list[str]:
    content = json.loads((directory / "found.json").read_text())
    return [row["verdict"] for row in content["compared"]]


@pytest.mark.ranks
def test_a_recipe_with_shards_has_the_same_bits(paceline: Paceline, tmp_path: Path) -> None:
    options = ("--shards", "4", "--steps", "3", "--workers", "1,2,3", *QUICK)
    done = paceline.run("verify", "digits", *options)
    assert done.code == 0, done.out + done.err
    assert verdicts(tmp_path) == ["-", "same bits", "same bits"]
    assert "the end of an epoch wasn't reached in 3 steps" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_recipe_whose_batchnorm_sees_shares(paceline: Paceline, tmp_path: Path) -> None:
    done = paceline.run("verify", "digits", "--steps", "2", "--tolerance", "1e-4", *QUICK)
    assert done.code == 65, done.err
    assert "1. batchnorm-share (2 workers, from step 1 on" in done.out
    assert verdicts(tmp_path) == ["-", "different"]


@pytest.mark.ranks
def test_a_session_is_the_same_to_rounding(paceline: Paceline, tmp_path: Path) -> None:
    """Its Adam makes noise large (a bias before a BatchNorm): the yardstick has to tell."""
    write_script(tmp_path, run=STRICT)
    done = paceline.run("verify", "own.py", "--sync-batchnorm", *QUICK)
    assert done.code == 0, done.out + done.err
    assert verdicts(tmp_path) == ["-", "same to rounding"]
    assert "1 worker disturbed" in done.out
    assert "dropout was left out" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "own.py"]


@pytest.mark.ranks
def test_a_script_that_fails_and_its_arguments(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys\nraise KeyError(sys.argv[1])\n")
    done = paceline.run("verify", "own.py", *QUICK, "--", "mine")
    assert done.code == 65
    assert "KeyError: 'mine'" in done.out
    assert verdicts(tmp_path) == ["failed", "not run"]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_script_that_trains_nothing_and_shards_without_a_session(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("print('nothing')\n")
    done = paceline.run("verify", "own.py", *QUICK, "--shards", "4")
    assert done.code == 65
    assert "on 1 worker no optimizer took a step" in done.out
    assert verdicts(tmp_path) == ["-", "nothing to compare"]
    assert "--shards has no effect" in done.err


def test_a_run_directory_is_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert main(["verify", str(tmp_path)]) == 2
    assert "is a run directory" in capsys.readouterr().err


@pytest.mark.ranks
def test_what_contradicts_the_script_is_wrong_usage(paceline: Paceline, tmp_path: Path) -> None:
    write_script(tmp_path, run=RUN.replace("loader_workers=0", 'precision="bf16"'))
    done = paceline.run("verify", "own.py", "--precision", "fp16", *QUICK)
    assert done.code == 2
    assert "--precision fp16" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "what to verify is missing"),
        (("nowhere.py",), "there is no file nowhere.py"),
        (("digit",), "unknown recipe 'digit'"),
        (("digits", "--workers", "2"), "give --workers, such as 1,2"),
        (("digits", "--workers", "1,x"), "'x' is no whole number"),
        (("digits", "--workers", "0,2"), "'0' is not from 1 to"),
        (("digits", "--workers", "1,5", "--shards", "4"), "5, more than --shards 4"),
        (("digits", "--tolerance", "-1"), "--tolerance must be at least 0, not -1"),
        (("digits", "--json", "no/found.json"), "there is no directory for it"),
        (("digits", "--html", "no/page.html"), "--html no/page.html: there is no directory for it"),
        (("digits", "--html", "."), "--html . is a directory: give a file's name"),
        (("digits", "--html", "a", "--json", "./a"), "--json and --html both say a"),
        (("digits", "--steps", "0"), "--steps must be at least 1"),
        (("digits", "--max-restarts", "1"), "unknown option '--max-restarts'"),
        (("digits", "--global-batch", "1"), "2 workers are more than the 1 sample of"),
        (("digits", "--", "more"), "arguments after -- are for a script"),
        (("digits", "--resume", "--workers", "1,2"), "with --resume it is one number"),
        (("digits", "--kill-at-step", "3"), "--kill-at-step has no effect without --resume"),
        (("digits", "--resume", "--kill-at-step", "0"), "--kill-at-step must be at least 1"),
        (("digits", "--resume-workers", "3"), "--resume-workers has no effect without --resume"),
        (
            ("digits", "--resume", "--shards", "2", "--resume-workers", "3"),
            "--resume-workers says 3, more than --shards 2",
        ),
        (("digits", "--resume", "--resume-args", "--go on"), "--resume-args are for a script"),
        (("digits", "--resume", "--resume-args", "it's"), "No closing quotation"),
        (("digits", "--resume", "--resume-args", "--on"), "write --resume-args=--on"),
    ],
)
@pytest.mark.core_cases(7)
def test_usage(words: tuple[str, ...], message: str, refusal: Callable[..., str]) -> None:
    assert message in refusal("verify", *words)


def test_the_page_is_made_from_what_json_holds() -> None:
    first = launch([trained(["1", "2"], 1.0, 1.0), trained(["3", "4"], 0.5, 2.0)])
    other = launch([trained(["1", "2"], 1.0, 1.0), trained(["3", "4"], 0.75, 3.0)])
    limits = given_limits(1e-6)
    results = (evaluate_first(first), evaluate_launch(first, other, limits))
    outcome = counts_report(results, limits, ["what --steps cuts off"])
    found = json.loads(json.dumps(outcome.as_json()))
    assert found["losses"] == [
        {"launch": "1 worker", "from_step": 1, "values": [1.0, 0.5]},
        {"launch": "1 worker", "from_step": 1, "values": [1.0, 0.75]},
    ]
    assert found["first_differences"] == [
        {"launch": "1 worker", "step": 2, "in": ["loss", "gradients"]}
    ]
    assert [" ".join(row).split() for row in found["table"]] == [
        line.split() for line in outcome.as_text().split("\n\n")[1].splitlines()
    ]
    page = render_verification(found)
    for part in (found["verdict"], "step 2 is the first that differs", "<code>--steps</code>"):
        assert part in page


def test_a_page_is_written_over_its_own_kind_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.html").write_text("<title>mine</title>")
    assert main(["verify", "digits", "--html", "page.html"]) == 2
    assert "page.html is there, and is no page of `paceline verify`" in capsys.readouterr().err
    assert (tmp_path / "page.html").read_text() == "<title>mine</title>"


def test_a_file_of_somebody_else_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.json"
    for content in ('{"keep": 1}', "keep"):
        mine.write_text(content)
        assert main(["verify", "digits", "--json", "mine.json"]) == ExitCode.USAGE
        assert "mine.json is there already, and not of paceline verify" in capsys.readouterr().err
        assert mine.read_text() == content


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_directory_that_cant_be_written(
    option: str, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    message = f"{option} found: its directory can't be written"
    assert message in refusal("verify", "digits", option, "found")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--", "a launching command is missing after --"),
        ("-- torchrun --nproc-per-node 2 train.py", "there is no file train.py"),
        ("torchrun --nproc-per-node 2 train.py", "`paceline verify -- torchrun ...`"),
        ("-- fabric run train.py", "known are torchrun, accelerate launch and python"),
        ("-- torchrun -m train", "1 worker alone can't be compared: give --workers"),
        ("-- torchrun --nproc-per-node gpu -m train", "doesn't say in figures"),
        ("-- accelerate launch -m train", "doesn't say in figures"),
        ("--workers 1 -- torchrun -m train", "1 worker alone can't be compared"),
        ("--resume --steps 3 train.py -- 3", "there is no file train.py"),
        (
            "--tolerance 0 train.py healthy",
            "Arguments of the script itself come after --: paceline",
        ),
        (
            "--resume -- torchrun --nproc-per-node gpu -m t",
            "doesn't say in figures how many workers it starts: give --workers before --, such "
            "as --workers 2",
        ),
        ("--nproc 2 -- torchrun -m train", "unknown option '--nproc'"),
        ("-m package.module -- --lr 0.1", "a module (-m) is verified by the command"),
    ],
)
def test_usage_of_launching_commands(words: str, message: str, refusal: Callable[..., str]) -> None:
    assert message in refusal("verify", *words.split())


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        ("-- torchrun --nproc-per-node 3 -m train", (1, 3)),
        ("--workers 2 -- torchrun --nproc-per-node gpu -m train --help", (1, 2)),
        ("--workers 3,1,2 -- torchrun --nproc-per-node 8 -m train", (1, 2, 3)),
        ("-- torchrun --nproc-per-node {workers} -m train", (1, 2)),
        ("-- python -m train {workers}", (1, 2)),
        ("--workers 3 -- python -m train {workers}", (1, 3)),
    ],
)
def test_numbers_of_workers_of_a_launching_command(
    words: str, workers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, ...]] = []

    def verify(asked: VerifyRequest, place: Path) -> int:
        found.append(asked.workers)
        return 0

    monkeypatch.setattr(verify_command, "_verify", verify)
    assert main(["verify", *words.split()]) == 0
    assert found == [workers]


def test_help_of_a_recipe_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "digits", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--tolerance" in shown
    assert "--global-batch" in shown


SETTINGS = """
import json, os, sys, torch
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "WORLD_SIZE")
exact = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
sys.exit(json.dumps([torch.get_num_threads(), *exact, *map(os.environ.get, names)]))
"""


@pytest.mark.ranks
@pytest.mark.parametrize("options", [(), ("--shards", "4"), ("--threads", "1")])
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.core_cases(1)
def test_workers_are_started_as_run_starts_them(
    options: tuple[str, ...], workers: str, paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(SETTINGS)
    run = paceline.run("run", "own.py", "--workers", workers, *options)
    counts = f"{workers},3"
    verified = paceline.run("verify", "own.py", "--workers", counts, *options)
    found = [re.search(r"sys\.exit\('(\[.*?\])'\)", done.err) for done in (run, verified)]
    assert found[0] is not None, run.err
    assert found[1] is not None, verified.err
    assert found[0][1] == found[1][1]
    assert json.loads(found[0][1])[-1] == workers


NEEDS_GPU = """
import torch
from torch import nn

print("building the model")
model = nn.Linear(6, 2)
model.cuda()
"""


@pytest.mark.ranks
# Not forked: torch may say there that CUDA can't be used after a fork.
@pytest.mark.slow
def test_a_script_for_gpus_alone(
    cold_paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "own.py").write_text(NEEDS_GPU)
    done = cold_paceline.run("verify", "own.py", *QUICK)
    words = " ".join(done.out.split())
    assert done.code == 65
    assert "needs-gpu" in words
    assert "(line 7 of own.py: model.cuda())" in words
    assert "x.to(device) rather than x.cuda()" in words
    assert "building the model" in done.err
    assert "Conclusion: the script fails on 1 worker, so that nothing could be compared." in words
