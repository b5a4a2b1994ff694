"""`--config` and `--print-config`: settings in a file, and what they come to."""

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import scale_options
from paceline.cli.app import main
from paceline.cli.commands import verify
from paceline.errors import ExitCode
from paceline.options.command_line import INTERNAL_VARIABLES, read_options
from paceline.options.config_file import CONFIG
from paceline.scaling.commands import idle_without_training, without_idle
from paceline.training.config import training_options

_GOLDEN = Path(__file__).parents[1] / "results" / "golden" / "run" / "run.json"
Printed = Callable[..., str]


@pytest.fixture
def printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Printed:
    """Gives what `paceline train ... --print-config` prints."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        assert main(["train", *words, "--print-config"]) == ExitCode.DONE, capsys.readouterr().err
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "line",
    [
        "digits --lr 0.02 --global-batch 32 --dropout 0.3 --shift 0 --seed 7",
        "digits --target-accuracy none --optimizer adam --betas 0.8 0.9 --schedule constant",
        "mnist --data-dir files --no-download --time-budget 1h30m --sync powersgd --warmup-steps 3",
        "synthetic --shards 4 --threads 1 --workers 2 --tensorboard --progress off",
    ],
)
@pytest.mark.core_cases(2)
def test_what_is_printed_is_read_again(line: str, printed: Printed, tmp_path: Path) -> None:
    text = printed(*line.split())
    (tmp_path / "job.toml").write_text(text)
    assert printed("--config", "job.toml") == text
    assert list(tmp_path.iterdir()) == [tmp_path / "job.toml"], "nothing else is made"
    # Each option is there, set or as a comment.
    names = {part.split(" = ")[0].removeprefix("# ") for part in text.splitlines()[1:]}
    options = training_options().values()
    assert {o.name.replace("_", "-") for o in options} <= names


def test_the_values_are_those_that_count(printed: Printed, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('recipe = "mnist"\nepochs = 3\nglobal-batch = 32\n')
    found = tomllib.loads(printed("--config=job.toml", "--epochs", "4", "--lr", "0.5"))
    assert found["recipe"] == "mnist"
    assert (found["epochs"], found["global-batch"], found["lr"]) == (4, 32, 0.5)
    assert "powersgd-rank" not in found


def test_a_run_can_be_repeated(printed: Printed, tmp_path: Path) -> None:
    run = json.loads(_GOLDEN.read_text())
    found = tomllib.loads(printed("--config", str(_GOLDEN)))
    assert found["recipe"] == run["recipe"]
    for name in ("epochs", "lr", "momentum", "schedule", "target_accuracy", "global_batch"):
        assert found[name.replace("_", "-")] == run["settings"][name]
    assert found["shift"] == run["recipe_arguments"]["shift"]
    assert main(["train", "synthetic", "--config", str(_GOLDEN), "--print-config"]) == 2


def test_settings_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    Path("job.toml").write_text('precision = "bf16"\nglobal-batch = 12\n')
    assert main(["run", "mine.py", "--config", "job.toml", "--print-config"]) == ExitCode.DONE
    found = tomllib.loads(capsys.readouterr().out)
    assert found == {"precision": "bf16", "global-batch": 12}
    Path("job.toml").write_text("lr = 0.1\n")
    assert main(["run", "mine.py", "--config", "job.toml"]) == ExitCode.USAGE
    assert "job.toml:1: unknown setting 'lr'" in capsys.readouterr().err


_OTHERS = {
    "verify": lambda words: verify._read(words).training.recipe,
    "scale": lambda words: scale_options.read(words).commands.target,
}


@pytest.mark.parametrize("command", _OTHERS)
def test_a_file_names_the_recipe_for_other_commands_as_well(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--config", "job.toml")
    elsewhere = ('copy-to = "file:///nowhere"', 'tracker = ["wandb"]')
    lines = ('recipe = "synthetic"', "global-batch = 24", "size = 8", 'name = "mine"', *elsewhere)
    Path("job.toml").write_text("\n".join(lines))
    assert _OTHERS[command](words) == "synthetic"
    # What the command settles itself is said to have no effect.
    said = capsys.readouterr().err
    for number, name in ((4, "name"), (5, "copy-to"), (6, "tracker")):
        assert f"job.toml:{number}: {name} has no effect on paceline {command}" in said
    assert main([command, "digits", *words]) == ExitCode.USAGE
    assert "--config job.toml is for the recipe synthetic, and the command names digits" in (
        capsys.readouterr().err
    )
    # What belongs to whole trainings is left out of measurements.
    assert _OTHERS[command](("--config", str(_GOLDEN))) == "digits"
    said = capsys.readouterr().err
    assert ("epochs has no effect without --" in said) == (command != "verify")
    assert "which settles it" not in said
    Path("mine.py").touch()
    assert main([command, "mine.py", *words]) == ExitCode.USAGE
    assert "and the command names mine.py" in capsys.readouterr().err
    Path("job.toml").write_text("epoch = 3")
    assert main([command, *words]) == ExitCode.USAGE
    assert " is missing. Usage: " in capsys.readouterr().err
    assert main([command, "digits", *words]) == ExitCode.USAGE
    assert "job.toml:1: unknown setting 'epoch'. Did you mean 'epochs'?" in capsys.readouterr().err


def test_a_file_may_say_how_a_training_combines_gradients(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its method is the study's to choose; so are options of that method."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('recipe = "digits"\nsync = "powersgd"\npowersgd-rank = 2\n')
    words = ("--config", "job.toml")
    assert _OTHERS["scale"](words) == "digits"
    said = capsys.readouterr().err
    assert "job.toml:2: sync has no effect on paceline scale" in said
    assert "job.toml:3: powersgd-rank has no effect " in said
    assert main(["scale", "digits", "--powersgd-rank", "2"]) == ExitCode.USAGE
    assert "--powersgd-rank has no effect " in capsys.readouterr().err
    asked = scale_options.read((*words, "--methods", "allreduce,powersgd"))
    assert asked.commands.methods == {"powersgd_rank": 2}


def test_reading_options_changes_none_that_were_given(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("epochs = 3\nlr = 0.1\n")
    words = ("--config", str(tmp_path / "job.toml"))
    found = read_options("paceline scale", "", words, [CONFIG, *training_options().values()])
    before = dict(found.values)
    left = without_idle(found, idle_without_training(found.values, is_script=False))
    assert found.values == before
    assert left == {name: value for name, value in before.items() if name != "epochs"}


def test_what_is_verified_is_what_the_file_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ("steps = 3", "global-batch = 24", "lr = 0.5", "workers = 4")
    Path("job.toml").write_text("\n".join(lines))
    asked = verify._read(("digits", "--config", "job.toml", "--batch-per-worker", "8"))
    config = asked.config
    assert (asked.options.steps, config.optim.lr, asked.workers) == (3, 0.5, (1, 2))
    assert (config.data.batch_per_worker, config.data.global_batch) == (8, None)
    assert "job.toml:4: workers has no effect on paceline verify" in capsys.readouterr().err
    Path("job.toml").write_text('workers = "1,3"')
    assert verify._read(("digits", "--config", "job.toml")).workers == (1, 3)
    Path("job.toml").write_text('recipe = "digits"')
    words = ("--config", "job.toml", "--", "torchrun", "--nproc-per-node", "2", "mine.py")
    assert main(["verify", *words]) == ExitCode.USAGE
    assert "--config job.toml is for the recipe digits" in capsys.readouterr().err


def test_a_recipe_in_a_file_is_the_same_by_either_path(
    printed: Printed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(
        "import paceline\n\n@paceline.recipe\ndef build():\n    raise NotImplementedError\n"
    )
    (tmp_path / "job.toml").write_text(f'recipe = "{tmp_path}/mine.py:build"\n')
    assert 'recipe = "mine.py:build"' in printed("mine.py:build", "--config", "job.toml")


def test_the_batch_of_a_file_is_that_of_one_worker_where_a_study_scales_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('recipe = "digits"\nglobal-batch = 24\n')
    for words, batch in (
        ((), 24),
        (("--mode", "strong"), 24),
        (("--batch-per-worker", "8"), 8),
    ):
        asked = scale_options.read(("--config", "job.toml", "--workers", "1", *words))
        assert asked.batch == batch
        assert "global_batch" not in asked.commands.given or "strong" in words


@pytest.mark.parametrize("command", ["resume", "scale", "verify"])
def test_other_commands_read_it_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(_GOLDEN.parent) if command == "resume" else "digits"
    assert main([command, target, "--config", "nowhere.toml"]) == ExitCode.USAGE
    assert "--config nowhere.toml can't be read" in capsys.readouterr().err


def test_of_options_that_exclude_each_other_the_typed_one_counts(
    printed: Printed, tmp_path: Path
) -> None:
    found = tomllib.loads(printed("--config", str(_GOLDEN), "--batch-per-worker", "16"))
    assert found["batch-per-worker"] == 16
    assert "global-batch" not in found
    (tmp_path / "job.toml").write_text("warmup-steps = 5\n")
    found = tomllib.loads(printed("digits", "--config", "job.toml", "--warmup-epochs", "2"))
    assert found["warmup-epochs"] == 2
    assert "warmup-steps" not in found


def test_a_misspelt_variable_is_noticed_and_others_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    for name in (
        "EPOCH",
        "GLOBALBATCH",
        "LR",
        "BATCH_SIZE",
        "NO_TENSORBOARD",
        "PARTITION",
        "ROOT",
    ):
        monkeypatch.setenv(f"PACELINE_{name}", "1")
    for name in INTERNAL_VARIABLES - {"PACELINE_ATTEMPT", "PACELINE_NODE", "PACELINE_REQUEST"}:
        monkeypatch.setenv(name, "1")
    misspelt = [
        "PACELINE_BATCH_SIZE sets nothing: did you mean PACELINE_GLOBAL_BATCH?",
        "PACELINE_EPOCH sets nothing: did you mean PACELINE_EPOCHS?",
        "PACELINE_GLOBALBATCH sets nothing: did you mean PACELINE_GLOBAL_BATCH?",
    ]
    of_recipes = (
        "PACELINE_LR sets nothing: a script chooses its optimizer, learning rate and loss itself"
    )
    for words, more in ((["train", "digits"], []), (["run", "mine.py"], [of_recipes])):
        assert main([*words, "--print-config"]) == ExitCode.DONE
        assert capsys.readouterr().err.splitlines() == [*misspelt, *more]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["train", "digits", "--print-config"]) == ExitCode.DONE
    assert not capsys.readouterr().err


def test_every_variable_of_our_own_is_known() -> None:
    package = Path(__file__).parents[2] / "src" / "paceline"
    named = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r"PACELINE_[A-Z_]*[A-Z]", path.read_text())
    }
    settings = {f"PACELINE_{name.upper()}" for name in [*training_options(), "config"]}
    assert named - settings == INTERNAL_VARIABLES


@pytest.mark.parametrize("where", ["typed", "environment"])
def test_a_file_for_another_recipe_is_refused(
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "job.toml").write_text('recipe = "mnist"\n')
    monkeypatch.chdir(tmp_path)
    words = ["--config", "job.toml"]
    if where == "environment":
        monkeypatch.setenv("PACELINE_CONFIG", words.pop())
        words = []
    assert main(["train", "digits", *words, "--print-config"]) == ExitCode.USAGE
    assert "--config job.toml is for the recipe mnist, and the command names digits" in (
        capsys.readouterr().err
    )
    assert main(["train", *words, "--print-config"]) == ExitCode.DONE
    assert 'recipe = "mnist"' in capsys.readouterr().out
    assert main(["resume", str(_GOLDEN.parent), *words]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert f"job.toml is for the recipe mnist, and {_GOLDEN.parent} is a training of digits" in said
