"""Wrong usage: a clear message, exit code 2, nothing started, nothing left behind."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from paceline.cli.app import COMMANDS, main
from paceline.cli.cluster_submit import cluster_options
from paceline.errors import ExitCode
from paceline.options.command_line import flag
from paceline.options.fields import with_dashes
from paceline.runtime.placement import warn_of_no_effect
from paceline.runtime.spec import Place
from paceline.training.config import training_options


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


_GOLDEN = Path(__file__).parents[1] / "results" / "golden" / "run"
_WRONG = [
    ("tran", r"unknown command 'tran'. Did you mean 'train'\? Known: .*resume"),
    ("train digit", r"unknown recipe 'digit'. Did you mean 'digits'\? Known: cifar10-wideresnet"),
    ("train bars.py", r"'bars.py' is a file.* bars.py:function.*`paceline run bars.py`"),
    (
        "scale digits --workers 1 2",
        r"unexpected '2': put commas.* --workers 1,2",
    ),
    ("train digits --epoch 3", r"unknown option '--epoch'. Did you mean '--epochs'\? paceline tr"),
    (
        "train digits --image-size 8",
        r"unknown option '--image-size'. paceline train digits --help-al",
    ),
    (
        "train digits --max-epochs 8",
        r"Did you mean '--epochs'\? paceline train digits --help-all lis",
    ),
    ("train digits --global-batch 0", r"--global-batch is 0: it must be at least 1"),
    ("train digits --lr fast", r"--lr is 'fast'; it must be a number"),
    ("train digits --optimizer adm", r'"adm" for --optimizer. Choose from: "sgd", "adam"'),
    ("train digits --optimizer adam --momentum 0.9", r"adam has no --momentum.*sgd, lars"),
    ("train digits --epochs x", r"--epochs is 'x'; it must be a whole number. See paceline train"),
    ("train digits --lr 1 --lr 2", r"--lr is given more than once. See paceline train digits"),
    ("train digits --lr", r"--lr has no value. See paceline train digits --help"),
    ("train digits --time-budget -5s", r"no value: '-5s' after it.*write --time-budget=-5s"),
    ("train digits --time-budget=-5s", r"--time-budget is '-5s', not a duration.*must be above 0"),
    ("train digits --betas 0.9", r"--betas takes 2 values, with a space between them, and has 1"),
    ("train digits --drop-last yes", r"--drop-last takes no value, and 'yes'.*--no-drop-last swi"),
    ("train digits --powersgd-rank 4", r"--powersgd-rank has no effect with --sync allreduce"),
    ("train digits --sync powersgd --sync-precision bf16", r"--sync-precision has no effect"),
    ("train digits --compile-mode reduce-overhead", r"reduce-overhead needs --compile"),
    ("train synthetic --patience 1", r"--patience has no effect without --target-accuracy"),
    ("train digits --no-allow-different-hardware", r"has no effect without --shards"),
    ("train digits --init-method tcp://node0", r"which has no port. Write env://, tcp://HOST"),
    ("train digits --workers 2000", r"2000 is more than one machine can start: at most 124"),
    ("scale digits --powersgd-rank 4", r"--powersgd-rank has no effect with --methods allreduce"),
    ("train digits --epochs 0", r"--epochs must be at least 1, not 0"),
    ("train digits extra", r"unexpected 'extra': it is one word too many"),
    ("train job.toml", r"'job.toml' is a file of settings, not a recipe: give it after --config"),
    ("train digits --resume", r"--resume needs --run-dir: a directory of a name that stays the sa"),
    ("train digits --device gpu", r'"auto", "cpu", "cuda", "xpu", "mps"\. See paceline train'),
    ("train digits --lr 1e30", r"--lr is 1e\+30: it can be at most 1e\+09"),
    ("train --workers 2 --no-drop-last --betas 0.9 0.99 digits --lr fast", r"train digits --help"),
    ("train --time-budget -5s digits", r"no value: '-5s' after it"),
    ("export --snapshot last somewhere", r"the file to write is missing"),
    ("train digits --global-batch 1 --workers 2", r"2 workers are more than the 1 sample of"),
    ("train digits --global-batch 64 --batch-per-worker 3 --workers 2", r"disagree.*make 6"),
    ("train digits --threads 1000", r"--threads is 1000, but there (is|are) \d+ CPU core.*at most"),
    ("train digits --device cuda", r"--device cuda needs a GPU, and this machine has none"),
    ("train digits --backend nccl", r"--backend nccl needs GPUs"),
    ("train digits --target-accuracy 97", r"between 0 and 1, not 97: for 97 % write 0.97"),
    (
        "train digits --time-budget soon",
        r"--time-budget is 'soon', not a duration. Write for example 90s",
    ),
    ("train digits --keep-last 1", r"at least 2"),
    ("train nowhere.py:build", r"there is no file .*nowhere.py"),
    ("resume nowhere", r"there is no run directory nowhere, and no run below .*runs is called so"),
    ("resume", r"no run below .*runs is unfinished. Name a run directory: paceline resume RUN_DIR"),
    ("resume --rank 1", r"name the run directory: of several workers .* each might find another"),
    ("export somewhere", r"the file to write is missing"),
    ("report nowhere", r"there is no run directory nowhere.*`paceline runs` lists them"),
]


@pytest.mark.parametrize(("line", "message"), _WRONG, ids=[line for line, _ in _WRONG])
@pytest.mark.core_cases(5)
def test_wrong_usage(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in line or "nccl" in line:
        _skip_where_gpus_are()
    assert main(line.split()) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_existing_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({}))
    assert main(["train", "--run-dir", str(tmp_path)]) == ExitCode.USAGE
    assert "already holds a training" in capsys.readouterr().err


_SECOND_OF_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_the_other_workers_leave_an_existing_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in _SECOND_OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert main(["train", "--run-dir", str(run)]) == ExitCode.USAGE
    assert capsys.readouterr() == ("", "")  # the first worker says why
    assert list((run / "logs").iterdir()) == []


def test_an_option_of_our_launcher_under_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_no_effect(Place(here=True), ("max_restarts",))
    assert "--max-restarts has no effect here" in capsys.readouterr().err
    warn_of_no_effect(Place(here=True), ("epochs",))
    warn_of_no_effect(Place(here=False), ("max_restarts",))
    assert capsys.readouterr().err == ""


def test_a_recipes_file_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "job_that_fails.py").write_text("def build():\n    pass\n\n1 / 0\n")
    assert main(["train", "job_that_fails.py:build"]) == ExitCode.JOB
    told = capsys.readouterr().err
    assert told.splitlines()[0].endswith("job_that_fails.py fails when it is imported:")
    assert "line 4" in told
    assert "paceline/" not in told


def test_unwritable_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", "--run-dir", str(tmp_path / "file" / "run")]) == ExitCode.USAGE
    assert "can't be written (Not a directory)" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.core_cases(9)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == ExitCode.DONE
    assert "Usage: paceline" in capsys.readouterr().out


def test_commands_of_every_day_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == ExitCode.DONE
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    listed = [words[1] for words in lines if words[:1] == ["│"]]
    assert listed == [*COMMANDS, "--help", "--version"]
    assert listed[0] == "train"


def test_short_help_and_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == ExitCode.DONE
    short = capsys.readouterr().out
    flags = {word for line in short.splitlines() for word in line.split()[:2] if word[:2] == "--"}
    assert short.startswith("Usage: paceline train RECIPE [OPTIONS]")
    assert {"--epochs", "--lr", "--global-batch", "--workers", "--run-dir"} <= flags
    assert 20 <= len(flags) <= 40
    assert "those of Combining gradients, Hosts, Cluster, Slurm and Sage" in " ".join(short.split())
    assert main(["train", "digits", "--help-all"]) == ExitCode.DONE
    every = capsys.readouterr().out
    assert every.startswith("Usage: paceline train digits [OPTIONS]")
    for option in (*training_options().values(), *cluster_options()):
        assert flag(option.name) in every, option.name
    assert "--empty" not in every
    assert "default: ()" not in every
    assert len(short.splitlines()) < len(every.splitlines()) / 3


@pytest.mark.parametrize("place", [0, 1])
def test_help_of_resume_shows_the_runs_own_values(
    place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--help-all"]
    words.insert(place, str(_GOLDEN))
    assert main(["resume", *words]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Usage: paceline resume {_GOLDEN} [OPTIONS]" in shown
    assert re.search(r"--epochs INT Passes over the training set\. \[default: 2\]", shown), shown
    assert re.search(r"--dropout FLOAT Share [^-]* \[default: 0\.2\]", shown)
    assert re.search(r"--workers INT [^\[]* \[default: 2\]", shown)


def test_help_of_resume_where_there_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "nowhere", "--help"]) == ExitCode.USAGE
    assert "there is no run directory nowhere" in capsys.readouterr().err
    assert main(["resume", "--help", "--lr", "0.1"]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "paceline resume [RUN_DIR] [OPTIONS]" in shown
    assert "--epochs INT Passes over the training set. --" in shown  # the run has its own


def test_help_says_of_a_switch_how_it_is_switched_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "digits", "--help"]) == ExitCode.DONE
    short = capsys.readouterr().out
    assert "--dry-run" in short
    assert "--no-dry-run" not in short
    assert "[default: False]" not in short
    assert main(["train", "digits", "--help-all"]) == ExitCode.DONE
    assert "--no-dry-run" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["evaluate", "verify", "export", "report"])
def test_a_usage_line_names_the_options_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == ExitCode.USAGE
    assert "[options] [options]" not in (error := capsys.readouterr().err)
    assert not error.rstrip().endswith("COMMAND [options]")


def test_dashes_and_underscores_are_one_in_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mine.py").touch()
    for words, told in (
        ("train digits --target_accuracy", "--target-accuracy has no value. See"),
        ("train digits --no_drop_last yes", "--no-drop-last takes no value"),
        ("run mine.py --lr_scaling 8", "a script chooses its optimizer, learning rate"),
        ("resume file:///nowhere/run --run_dir=a --epochs x", "there is no run at file:///nowhere"),
    ):
        assert main(words.split()) == ExitCode.USAGE, words
        assert told in capsys.readouterr().err, words


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--a_b=c_d e_f", "--a-b=c_d e_f"),
        ("--run_dir c/r--x_y", "--run-dir c/r--x_y"),
        ("a--b_c", "a--b_c"),
        ("--resume_args --auto_resume", "--resume-args --auto_resume"),
        ("--resume-args=--ckpt_path=x_y", "--resume-args=--ckpt_path=x_y"),
        ("--quiet --run_dir=a_b", "--quiet --run-dir=a_b"),
        ("--my_own -- --as_it_is", "--my-own -- --as_it_is"),
    ],
)
def test_only_the_names_of_options_are_spelled_with_dashes(typed: str, meant: str) -> None:
    assert with_dashes(typed.split()) == meant.split()


def test_what_follows_in_a_note_stays() -> None:
    assert with_dashes(["--note", "--my_x", "--g_h i"]) == ["--note", "--my_x", "--g_h i"]


@pytest.mark.parametrize(
    ("command", "doing", "word"),
    [("evaluate", "Evaluating", "RUN_DIR"), ("report", "Report of", "DIR")],
)
def test_without_a_run_the_newest_is_taken_and_named(
    command: str, doing: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == ExitCode.USAGE
    refused = capsys.readouterr().err
    assert refused.rstrip().endswith(f"Name a run directory: paceline {command} {word}")
    assert main([command, "--help"]) == ExitCode.DONE
    assert f"Usage: paceline {command} [{word}]" in capsys.readouterr().out
    for name, day in (("older", 1), ("newer", 2)):
        shutil.copytree(_GOLDEN, Path("runs", name))
        content = json.loads((_GOLDEN / "run.json").read_text())
        content |= {"started_at": f"2026-03-0{day}T00:00:00+00:00", "kind": "script", "history": []}
        Path("runs", name, "run.json").write_text(json.dumps(content))
    code = main([command])
    said = capsys.readouterr()
    assert f"{doing} runs/newer\n" in said.err
    if command == "report":
        assert code == ExitCode.DONE
        assert said.out == f"{Path.cwd()}/runs/newer/report.html\n"
    else:  # that is of a recipe alone
        assert "was trained by the script" in said.err
    assert main([command, "--help"]) == ExitCode.DONE
    assert "newest run" in " ".join(capsys.readouterr().out.split())


def test_a_scripts_own_names_are_not_taken_for_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").touch()
    for word, why in (
        ("--batch-size", ""),
        ("--output-dir", ""),
        ("--num-workers", ""),
        ("--lr", "a script chooses its optimizer, learning rate and loss itself. "),
    ):
        assert main(["run", "mine.py", word, "8"]) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert f"unknown option '{word}'" in said
        assert why in said
        assert said.rstrip().endswith("paceline run mine.py -- ...")


def test_help_shows_the_recipes_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "mnist", "--help"]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.split())
    assert "--data-dir" in shown
    assert re.search(r"--epochs INT Passes over the training set\. \[default: 5\]", shown), shown


def _skip_where_gpus_are() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")


def test_an_unknown_option_may_be_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    assert main(["run", "mine.py", "--workers", "2", "--hidden", "8"]) == ExitCode.USAGE
    said = " ".join(capsys.readouterr().err.split())
    assert "unknown option '--hidden'" in said
    assert said.endswith(
        "Arguments of the script itself come after --: paceline run mine.py -- ..."
    )
