"""The benchmark of `paceline tune`: its commands, its script and its table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning import TARGETS, row
from benchmarks.tuning_script import JOBS


def tried(settings: Mapping[str, Any], mean: float | None, verdict: str) -> Mapping[str, Any]:
    low, high = (None, None) if mean is None else (mean - 0.1, mean + 0.1)
    return {"settings": settings, "mean": mean, "low": low, "high": high, "verdict": verdict}


def test_a_row_has_what_was_taken_and_what_was_left() -> None:
    faster = tried({"compile": True}, 1.6, "faster")
    left = tried({"threads": 2}, 0.8, "no sure gain")
    failed = tried({"precision": "bf16"}, None, "failed: no such thing")
    found = {"tried": [faster, left, failed], "confirmed": tried({"compile": True}, 1.5, "faster")}
    name, taken, speed, others, took = row("mine", found, 90.0)
    assert (name, taken, speed) == ("mine", "`--compile`", "1.50 x (1.40-1.60)")
    assert others == "`--threads 2` 0.80 x (0.70-0.90), `--precision bf16` failed"
    assert took == "1.5 min"


def test_what_was_not_confirmed_is_left() -> None:
    found = {"tried": [tried({"compile": True}, 1.2, "faster")], "confirmed": None}
    _, taken, speed, others, _ = row("mine", found, 60.0)
    assert (taken, speed) == ("nothing", "as it was")
    assert others == "`--compile` 1.20 x (1.10-1.30)"


@pytest.mark.parametrize("name", TARGETS)
def test_a_command_names_its_data(name: str, tmp_path: Path) -> None:
    command = TARGETS[name].command(tmp_path, ["--budget", "1s"])
    assert not [word for word in command if "{" in word]
    if "script" in name:
        job = command[command.index("--") + 1]
        assert job in JOBS
