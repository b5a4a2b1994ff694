"""Every option with every nasty value: refused with a paragraph, or a value that can be."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.cli.cluster_submit import (
    cluster_options,
    take_cluster_choice,
)
from paceline.cli.commands.aws import _OPTIONS as AWS_OPTIONS
from paceline.errors import ExitCode, UsageError
from paceline.launch.registry import launchers
from paceline.options.command_line import flag, read_options
from paceline.options.fields import OptionField, OptionValue, option_fields
from paceline.options.text import printable, shortened
from paceline.provision.aws.options import (
    ClusterOptions,
    ConfirmOptions,
    NetworkOptions,
    NodeOptions,
)
from paceline.runtime.spec import Launch
from paceline.scaling.options import PredictOptions, ScaleOptions
from paceline.training.config import TrainConfig, training_options

NASTY = (
    *("nan", "inf", "-inf", "-1", "0", "1e308", "-1e308", "1e-320", "0.5", "", " ", "none"),
    *("9" * 5000, "1" + "0" * 30, "999999999999", "٣", "½", "1_0", "0x10", "+1", "1e9999"),
    *("a\0b", "a\nb", "\x1b[31mred", "\x9b2J", "--", "-x", "--epochs", "\udcff", "{", "[", "%s"),
    *("a:" + "9" * 5000, "a:-1", "1.." + "9" * 5000, "1..999999999", "9" * 400 + "d", "1e300h"),
    *("../..", "/dev/null", "/dev/zero", ",", "1,,2", "tcp://a:" + "9" * 5000, "tcp://[::1", "a=b"),
)
Given = dict[str, OptionValue]


def _made(*components: Callable[..., object]) -> Callable[[Given], object]:
    """Make components of the options that each of them has."""

    def make(given: Given) -> None:
        for component in components:
            assert isinstance(component, type)
            names = {option.name for option in option_fields(component, "")}
            component(**{name: value for name, value in given.items() if name in names})

    return make


def _elsewhere(given: Given) -> None:
    take_cluster_choice(dict(given)).hosts.read()
    _made(*(entry.options_class() for entry in launchers().values()))(given)


_TAKERS: Mapping[str, tuple[Sequence[OptionField], Callable[[Given], object]]] = {
    "training": ([*training_options().values()], TrainConfig.from_settings),
    "elsewhere": (cluster_options(), _elsewhere),
    "scale": (option_fields(ScaleOptions, ""), _made(ScaleOptions)),
    "predict": (option_fields(PredictOptions, ""), _made(PredictOptions)),
    "aws": (
        [*{o.name: o for own in AWS_OPTIONS.values() for o in own}.values()],
        _made(ClusterOptions, NodeOptions, NetworkOptions, ConfirmOptions),
    ),
}


def _values(option: OptionField) -> Sequence[str]:
    """All of them for numbers and text; a few where the parser alone decides."""
    is_closed = option.annotation is bool or "Literal" in str(option.annotation)
    return ("nan", "", "9" * 5000, "a\0b", "\x1b[31mred") if is_closed else NASTY


@pytest.mark.parametrize("kind", _TAKERS)
@pytest.mark.slow
def test_an_option_takes_a_value_or_refuses_it_in_a_paragraph(kind: str) -> None:
    options, take = _TAKERS[kind]
    wrong, refused = [], 0
    for option in options:
        for value in _values(option):
            try:
                words = [f"{flag(option.name)}={value}"]
                take(read_options("paceline x", "", words, [option]).values)
            except UsageError as error:
                refused += 1
                text = shortened(printable(str(error)))
                if len(text) > 3000 or re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text):
                    wrong.append((option.name, value[:20], text[:200]))
            except Exception as error:  # noqa: BLE001  # what must not come
                wrong.append((option.name, value[:20], repr(error)[:200]))
    assert wrong == []
    assert refused > 2 * len(options)


@pytest.mark.parametrize(
    "words",
    [
        ("--timeout-s", "nan"),
        ("--timeout-s", "inf"),
        ("--warmup-epochs", "1e308"),
        ("--lr", "1e308"),
        ("--weight-decay", "1e308"),
        ("--hosts", "a:" + "9" * 5000),
        ("--epochs", "9" * 5000),
        ("--workers", "1000000"),
        ("--data-dir", "a\0b"),
        ("--run-dir", ""),
        ("--run-dir", "a\0b"),
    ],
)
@pytest.mark.core_cases(4)
def test_the_command_ends_with_2(
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = "stl10-resnet18" if words[0] == "--data-dir" else "digits"
    assert main(["train", recipe, *words]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.startswith("paceline: ")
    assert "Traceback" not in said
    assert len(said) < 1500
    assert list(tmp_path.iterdir()) == []


def test_what_is_within_the_limits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(launch: Launch) -> int:
        started.append(launch)
        return ExitCode.DONE

    monkeypatch.setattr("paceline.runtime.start.start", start)
    words = ("--lr", "1e6", "--timeout-s", "86400", "--seed", str(2**63 - 1), "--epochs", "1000000")
    assert main(["train", "digits", *words]) == ExitCode.DONE
    assert len(started) == 1
