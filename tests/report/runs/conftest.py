"""Run directories in many states: copies of one that a training has left, changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.results.run_directory import RunDirectory

GOLDEN = Path(__file__).parents[2] / "results" / "golden" / "run"
MakeRun = Callable[..., RunDirectory]


def change(path: Path, **values: object) -> None:
    """Put other values into a JSON file; dictionaries are merged."""
    content = json.loads(path.read_text())
    for name, value in values.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the runs are: the working directory's `runs`."""
    return tmp_path / "runs"


@pytest.fixture
def make_run(folder: Path) -> MakeRun:
    """Make a run: make_run("a", ended="signal", run={"settings": {"lr": 0.1}}).

    `ended` is how its summary says that it ended; None leaves no summary.
    """

    def make(
        name: str,
        *,
        ended: str | None = "epochs",
        day: int = 1,
        run: dict[str, object] | None = None,
        summary: dict[str, object] | None = None,
    ) -> RunDirectory:
        shutil.copytree(GOLDEN, folder / name)
        made = RunDirectory(folder / name)
        started = f"2026-03-{day:02}T09:15:00+00:00"
        change(made.run_json, started_at=started, history=[{"started_at": started}], **(run or {}))
        change(made.summary_json, stopped_because=ended, **(summary or {}))
        if ended is None:
            made.summary_json.unlink()
        return made

    return make
