import pytest

from paceline.errors import UsageError
from paceline.runtime.script_options import script_options, settled
from paceline.training.config import training_options


def test_a_script_has_all_options_but_those_that_it_settles_itself() -> None:
    missing = training_options().keys() - script_options().keys()
    assert {"optimizer", "lr", "schedule", "label_smoothing"} <= missing
    assert {"epochs", "precision", "clip_norm", "global_batch", "seed"} <= script_options().keys()


def test_what_is_given_comes_on_top() -> None:
    assert settled({"epochs": 2}, {"seed": 1, "epochs": 2}) == {"epochs": 2, "seed": 1}


def test_disagreement_names_both() -> None:
    with pytest.raises(UsageError, match=r"the script says epochs=2, .* says --epochs 3"):
        settled({"epochs": 2}, {"epochs": 3})


def test_an_unknown_name_suggests_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError, match=r"session\(\): unknown option 'epoch'. .* 'epochs'\?"):
        settled({"epoch": 2}, {})
