"""A page of each kind: finished, running and failed runs, a study, a comparison."""

import csv
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from paceline.report.page import write_run_report
from paceline.report.runs.comparison import choose_runs, compare, write_comparison
from paceline.report.scaling.page import write_scaling_report
from paceline.results.confusion import Confusion
from paceline.results.run_directory import RunDirectory
from tests.report.conftest import write_run

GOLDEN = Path(__file__).parent.parent / "results" / "golden"
NASTY = '<b>run</b> & "co" {{ 7 * 7 }} \u202efdp.exe </script><script>alert(1)</script>'
LONG = "a-name-without-any-space-" * 8


def finished(path: Path) -> RunDirectory:
    run = write_run(path, done=20, because="epochs")
    shutil.copy(GOLDEN / "run" / "profile.json", run.profile_json)
    _add_columns(run, {"exposed_comm": 0.28, "waiting": 0.12, "wire_bytes_per_step": 153512.0})
    _change(run.summary_json, wire_bytes_per_step=153512.0)
    write_confusion(run, [str(digit) for digit in range(10)])
    return run


def running(path: Path) -> RunDirectory:
    run = write_run(path, done=7, because=None)
    shutil.copy(GOLDEN / "run" / "profile.json", run.profile_json)
    return run


def one_epoch(path: Path) -> RunDirectory:
    return write_run(path, done=1, epochs=1, because="epochs")


def failed(path: Path) -> RunDirectory:
    run = write_run(path, done=7, because=None)
    trace = 'Traceback (most recent call last):\n  File "train.py", line 31, in <module>\n'
    record = {
        "rank": 1,
        "host": "node-2",
        "step": 171,
        "kind": "job",
        "error_type": "RuntimeError",
        "message": "mat1 and mat2 shapes cannot be multiplied (32x512 and 256x10)",
        "traceback": f"{trace}    loss = model(x)\nRuntimeError: mat1 and mat2 shapes " + 9 * "x ",
        "operation": "forward",
    }
    (run.logs / "failure-rank-1.json").write_text(json.dumps(record))
    return run


def regression(path: Path) -> RunDirectory:
    run = write_run(path, done=20, because="epochs", top5=False)
    _add_columns(run, {"train_accuracy": "", "val_accuracy": "", "val_mae": 0.25})
    _change(run.summary_json, val_accuracy=None, best_val_accuracy=None)
    return run


def nasty(path: Path) -> RunDirectory:
    run = write_run(path, done=9)
    names = {"name": NASTY, "note": f"{NASTY}\nsecond line {LONG}", "tag": [NASTY, LONG]}
    content = json.loads(run.run_json.read_text())
    content["settings"] |= {**names, NASTY: LONG}
    content["given"] += ["name", NASTY]
    content["command"] += ["--name", NASTY, LONG]
    content["hosts"] = [{"host": f"{LONG}{n}", "ranks": [n], "cpu": NASTY} for n in range(9)]
    run.run_json.write_text(json.dumps(content))
    write_confusion(run, [NASTY, LONG, "犬", "café au lait", *map(str, range(12))])
    return run


RUNS: Mapping[str, Callable[[Path], RunDirectory]] = {
    "finished": finished,
    "running": running,
    "one-epoch": one_epoch,
    "failed": failed,
    "regression": regression,
    "nasty": nasty,
}


def write_confusion(run: RunDirectory, names: list[str]) -> None:
    classes = len(names)
    counts = tuple(
        tuple(34 if i == j else (i * 7 + j * 3) % 11 // 9 for j in range(classes))
        for i in range(classes)
    )
    (run.path / "evaluation").mkdir()
    confusion = Confusion(classes=tuple(names), counts=counts, snapshot="step-000000000276")
    confusion.write(run.path / "evaluation" / "confusion.json")


def _add_columns(run: RunDirectory, columns: Mapping[str, object]) -> None:
    """Put values into each row; figures that are left grow a little from epoch to epoch."""
    with run.metrics_csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        row.update({k: v * (1 + number / 99) if v else "" for k, v in columns.items()})  # type: ignore[operator]
    with run.metrics_csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@contextmanager
def write_pages(scratch: Path) -> Iterator[Mapping[str, Path]]:
    """Write a page of each kind; the one that runs is locked while the block lasts."""
    pages = {}
    with ExitStack() as locks:
        for name, make in RUNS.items():
            run = make(scratch / name)
            if name == "running":
                locks.enter_context(run.lock())
            pages[name] = write_run_report(run)
        several = scratch / "several"
        for name in ("finished", "regression"):
            RUNS[name](several / name)
        compared = compare(choose_runs([str(several)]))
        pages["compare"] = write_comparison(compared, several / "compare.html")
        shutil.copytree(GOLDEN / "study", scratch / "study")
        pages["study"] = write_scaling_report(scratch / "study")
        yield pages
