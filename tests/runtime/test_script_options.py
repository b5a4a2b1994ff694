from contextlib import chdir
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode, UsageError
from paceline.runtime.script_options import refuse_of_recipes, script_options, settled
from paceline.training.config import training_options


def test_a_script_has_all_options_but_those_that_it_settles_itself() -> None:
    missing = training_options().keys() - script_options().keys()
    assert {"optimizer", "lr", "schedule", "label_smoothing"} <= missing
    assert {"epochs", "precision", "clip_norm", "global_batch", "seed"} <= script_options().keys()


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize("words", [["--help-all"], ["mine.py", "--help-all"]])
def test_help_shows_no_default_that_the_scripts_calls_say(
    command: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(tmp_path):
        Path("mine.py").touch()
        assert main([command, *words]) == ExitCode.DONE
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    for name, default in (("epochs", "10"), ("drop-last", "False")):
        said = shown[shown.index(f"--{name} ") :]
        assert f"[default: {default}]" not in said[: said.index(" --", 60)]
    assert "Default: what the script's s.epochs(...) says, else 10." in shown


def test_their_defaults_are_a_recipes() -> None:
    ours = training_options()
    assert all(option.default == ours[name].default for name, option in script_options().items())


def test_what_is_given_comes_on_top() -> None:
    assert settled({"epochs": 2}, {"seed": 1, "epochs": 2}) == {"epochs": 2, "seed": 1}


def test_disagreement_names_both() -> None:
    with pytest.raises(UsageError, match=r"the script says epochs=2, .* says --epochs 3"):
        settled({"epochs": 2}, {"epochs": 3})


def test_an_unknown_name_suggests_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError, match=r"session\(\): unknown option 'epoch'. .* 'epochs'\?"):
        settled({"epoch": 2}, {})
    for name, told in (
        ("lr", "a script chooses its optimizer, learning rate and loss itself"),
        ("optimizer", "a script chooses its optimizer"),
    ):
        with pytest.raises(UsageError, match=rf"session\(\): unknown option '{name}': {told}"):
            settled({name: 2}, {})


def test_on_the_command_line_a_scripts_options_pass_and_a_recipes_are_named() -> None:
    refuse_of_recipes(["--shards", "2", "--seed=1", "--allow-change", "lr", "-v", "--mine"], "")
    with pytest.raises(UsageError, match=r"unknown option '--lr': a script chooses .*\. Put it so"):
        refuse_of_recipes(["--seed", "1", "--lr=2"], "Put it so")
