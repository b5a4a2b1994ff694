"""`paceline evaluate RUN_DIR`: evaluates a run's model and draws its confusion matrix."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from paceline.distributed.options import DeviceKind
from paceline.errors import ExitCode, UsageError
from paceline.options.command_line import (
    note,
    read_command,
    snapshot_option,
)
from paceline.options.fields import OptionField
from paceline.options.figures import show_loss, show_percent
from paceline.options.text import aligned, printable
from paceline.results.run_directory import RunDirectory
from paceline.training.previous_run import PreviousRun

if TYPE_CHECKING:
    from paceline.training.evaluation.evaluate_run import EvaluationResult

_OPTIONS = (
    snapshot_option("Evaluation"),
    OptionField(
        name="device",
        annotation=DeviceKind,
        default="auto",
        help="What to compute on: auto, cpu or cuda, whatever the run was trained on.",
        group="Evaluation",
    ),
    OptionField(
        name="data_dir",
        annotation=str | None,
        default=None,
        help="Directory of the data, where it isn't the one that the run was trained on.",
        group="Evaluation",
    ),
)
_ABOUT = (
    "Print loss, top-1 and top-5 of a run's model on the validation set, and for each class recall "
    "(its accuracy), precision and F1. Write RUN_DIR/evaluation/confusion.png and .json, and "
    "RUN_DIR/report.html again, with the confusion matrix."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    (where,), given = read_command(
        "paceline evaluate RUN_DIR", _ABOUT, tokens, _OPTIONS, "the run directory"
    )
    run = RunDirectory.named(where)
    PreviousRun.read_recipe(run)  # before torch is loaded, and it is said which snapshot is taken
    from paceline.training.evaluation.evaluate_run import evaluate_run, find_snapshot

    arguments = {"data_dir": given["data_dir"]} if "data_dir" in given else {}
    device = cast(DeviceKind, given.get("device", "auto"))
    path = find_snapshot(run, str(given.get("snapshot", "best")), note)
    result = evaluate_run(run, path, arguments, device)
    totals = result.totals
    print(f"snapshot  {result.snapshot.name} (step {result.step})")
    if not totals.samples:
        print("samples   none: the validation set is empty, so there is nothing to evaluate")
        return ExitCode.DONE
    print(f"samples   {totals.samples}, each counted once")
    print(f"loss      {show_loss(totals.mean_loss)}")
    if result.top:
        print(f"top-1     {totals.accuracy:.2%}")
    if result.top == 5:
        print(f"top-5     {totals.top5_accuracy:.2%}")
    if result.class_names:
        _show_classes(run, result)
    return ExitCode.DONE


def _show_classes(run: RunDirectory, result: "EvaluationResult") -> None:
    """Write the confusion matrix, print the figures of each class, and write the report again."""
    from paceline.report.confusion import write_confusion
    from paceline.runtime.write_report import write_report

    directory = run.path / "evaluation"
    png, json = directory / "confusion.png", directory / "confusion.json"
    try:
        directory.mkdir(exist_ok=True)
        confusion = write_confusion(
            result.confusion.numpy(), result.class_names, png, json, result.snapshot.name
        )
    except OSError as error:
        raise UsageError(f"{directory} can't be written: {error.strerror}") from error
    rows = [("class", "recall", "precision", "F1", "samples")]
    for each in (*confusion.per_class, confusion.mean):
        recall, precision, f1 = map(show_percent, (each.recall, each.precision, each.f1))
        rows.append((printable(each.name), recall, precision, f1, str(each.samples)))
    print("", *aligned(rows, left=(0,)), sep="\n")
    print(f"\nconfusion matrix  {png}\n                  {json}")
    if write_report(run):
        print(f"report            {run.report_html}")
