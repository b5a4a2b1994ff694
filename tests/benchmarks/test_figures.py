import argparse
import json
from pathlib import Path

import pytest

from benchmarks.figures import Figure, Report, median_figure


def arguments(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**{"json": None, "check": False, "quick": False} | values)


def test_a_median_with_its_spread() -> None:
    figure = median_figure("speed", [1.0, 4.0, 2.0, 3.0, 5.0], "x", at_least=3.0)
    assert (figure.value, figure.low, figure.high, figure.count) == (3.0, 2.0, 4.0, 5)
    assert figure.met is True


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure(what="a", value=1.0, unit="x", at_most=1.1), True),
        (Figure(what="a", value=1.2, unit="x", at_most=1.1), False),
        (Figure(what="a", value=0.9, unit="x", at_least=0.98), False),
        (Figure(what="a", value=0.9, unit="x"), None),
    ],
)
def test_gates(figure: Figure, met: bool | None) -> None:
    assert figure.met is met


def test_a_missed_gate_fails_only_where_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(name="trial", figures=[Figure(what="cost", value=2, unit="", at_most=1)])
    file = tmp_path / "trial.json"
    assert report.finish(arguments(json=str(file))) == 0
    assert report.finish(arguments(check=True)) == 1
    assert "Gates missed: cost" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert content["figures"][0]["met"] is False
    assert content["machine"]
