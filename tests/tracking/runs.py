"""Run directories that grow as those of trainings do."""

import shutil
from pathlib import Path

from paceline.results.run_directory import RunDirectory

GOLDEN = Path(__file__).parents[1] / "results" / "golden" / "run"
HEADER = "epoch,step,time_s,train_loss,val_accuracy,lr,speed"
STEPS_HEADER = "epoch,step,time_s,samples,train_loss,lr"


def begun(path: Path) -> RunDirectory:
    """A training that has begun; nothing is measured yet."""
    run = RunDirectory.named(path)
    run.make()
    shutil.copy(GOLDEN / "run.json", run.run_json)
    truncate(run, epochs=0, steps=0)
    return run


def ended(run: RunDirectory) -> None:
    shutil.copy(GOLDEN / "summary.json", run.summary_json)


def epoch(run: RunDirectory, number: int, loss: float) -> None:
    """An epoch of four steps."""
    with run.metrics_csv.open("a") as file:
        file.write(f"{number},{4 * number},{number}.5,{loss},0.{number},0.1,{number}00\n")


def step(run: RunDirectory, number: int, loss: float) -> None:
    with run.steps_csv.open("a") as file:
        file.write(f"{(number + 3) // 4},{number},{number}.25,{64 * number},{loss},0.1\n")


def truncate(run: RunDirectory, *, epochs: int, steps: int) -> None:
    """What a resumed training leaves of the tables."""
    for path, header, kept in (
        (run.metrics_csv, HEADER, epochs),
        (run.steps_csv, STEPS_HEADER, steps),
    ):
        lines = path.read_text().splitlines()[1 : kept + 1] if path.exists() else []
        replaced = path.with_suffix(".new")
        replaced.write_text("".join(f"{line}\n" for line in (header, *lines)))
        replaced.rename(path)
