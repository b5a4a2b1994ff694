"""`paceline evaluate [RUN_DIR]`: evaluates a run's model and draws its confusion matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.output import Output, output_options, print_json
from paceline.distributed.options import DeviceKind
from paceline.errors import ExitCode
from paceline.files import writing
from paceline.options.command_line import ModelOptions, note, read_command
from paceline.options.fields import option_fields, pick
from paceline.options.figures import show_loss, show_percent
from paceline.options.text import aligned, printable
from paceline.results.confusion import Confusion
from paceline.results.find_runs import RUN_OR_NAME
from paceline.results.run_directory import RunDirectory
from paceline.runtime.write_report import write_report
from paceline.training.run_record.previous_run import PreviousRun

if TYPE_CHECKING:
    from paceline.training.evaluation.evaluate_run import EvaluationResult

_MAX_MISTAKES = 10
_ABOUT = (
    "Print loss, top-1 and top-5 of a run's model on the validation set, and for each class recall "
    "(its accuracy), precision and F1. Write RUN_DIR/evaluation/confusion.png and .json, and "
    "RUN_DIR/report.html again, with the confusion matrix. Without RUN_DIR, of the newest run "
    "below runs/. "
    f"{RUN_OR_NAME}"
)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Where and on what it is evaluated."""

    device: DeviceKind = "auto"
    """What to compute on: auto, cpu or cuda, whatever the run was trained on."""
    data_dir: str | None = None
    """Directory of the data, where it isn't the one that the run was trained on."""


_OPTIONS = (
    *option_fields(ModelOptions, "Evaluation"),
    *option_fields(EvaluateOptions, "Evaluation"),
    *output_options(
        "Print the figures alone, without those of each class.",
        "Also print which classes are taken for which.",
        "Print the figures as one JSON object on standard output.",
    ),
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    named, given = read_command(
        "paceline evaluate [RUN_DIR]", _ABOUT, tokens, _OPTIONS, "the run directory"
    )
    from paceline.report.runs.listing import run_of_command

    output = Output.take(given)
    run = run_of_command(named, "evaluate", "Evaluating", "RUN_DIR")
    PreviousRun.read_recipe(run)  # before torch is loaded, and it is said which snapshot is taken
    from paceline.training.evaluation.evaluate_run import (
        evaluate_run,
        find_snapshot,
        is_best_snapshot,
    )

    arguments = {"data_dir": given["data_dir"]} if "data_dir" in given else {}
    which, own = pick(ModelOptions, given), pick(EvaluateOptions, given)
    path = find_snapshot(run, which.snapshot, note)
    with output.apart():  # a recipe may print
        result = evaluate_run(run, path, arguments, own.device, ema=which.ema)
    classes = _write_confusion(run, result) if result.class_names and result.samples else None
    has_report = classes is not None and write_report(run)
    if output.json:
        print_json(_as_json(result, classes, run))
        return ExitCode.DONE
    _show_figures(result, is_best=is_best_snapshot(run, path))
    if classes is not None and not output.quiet:
        _show_classes(classes)
        if output.verbose:
            _show_mistakes(classes)
        print("\nconfusion matrix  " + "\n                  ".join(map(str, _files(run))))
        if has_report:
            print(f"report            {run.report_html}")
    return ExitCode.DONE


def _as_json(
    result: "EvaluationResult", classes: Confusion | None, run: RunDirectory
) -> Mapping[str, object]:
    return {
        "snapshot": str(result.snapshot),
        "step": result.step,
        "samples": result.samples,
        "loss": _number(result.figures.get("loss")),
        "accuracy": _number(result.figures.get("accuracy")),
        "top5_accuracy": _number(result.figures.get("top5_accuracy")),
        "classes": [asdict(each) for each in classes.per_class] if classes else [],
        "confusion": [str(file) for file in _files(run)] if classes else [],
    }


def _number(value: float | None) -> float | None:
    """Give what JSON can carry: it has no NaN."""
    return value if value is not None and isfinite(value) else None


def _show_figures(result: "EvaluationResult", *, is_best: bool) -> None:
    best = ", the best by validation" if is_best else ""
    print(f"snapshot  {result.snapshot.name} (step {result.step:,}{best})")
    if not result.samples:
        print("samples   none: the validation set is empty, so there is nothing to evaluate")
        return
    print(f"samples   {result.samples}, each counted once")
    print(f"loss      {show_loss(result.figures['loss'])}")
    if "accuracy" in result.figures:
        print(f"top-1     {show_percent(result.figures['accuracy'])}")
    if "top5_accuracy" in result.figures:
        print(f"top-5     {show_percent(result.figures['top5_accuracy'])}")


def _show_classes(classes: Confusion) -> None:
    rows = [("class", "recall", "precision", "F1", "samples")]
    for each in (*classes.per_class, classes.mean):
        recall, precision, f1 = map(show_percent, (each.recall, each.precision, each.f1))
        rows.append((printable(each.name), recall, precision, f1, str(each.samples)))
    print("", *aligned(rows, left=(0,)), sep="\n")


def _show_mistakes(classes: Confusion) -> None:
    """Print which classes are taken for which, the most frequent first."""
    names = classes.classes
    mistakes = [(n, names[truth], names[answer]) for n, truth, answer in classes.mistakes()]
    print("\nmost frequent mistakes" if mistakes else "\nno mistakes")
    for amount, truth, answer in sorted(mistakes, reverse=True)[:_MAX_MISTAKES]:
        print(printable(f"{amount:7d}  {truth} taken for {answer}"))


def _files(run: RunDirectory) -> tuple[Path, Path]:
    """Name the picture of the confusion matrix and its JSON."""
    directory = run.path / "evaluation"
    return directory / "confusion.png", directory / "confusion.json"


def _write_confusion(run: RunDirectory, result: "EvaluationResult") -> Confusion:
    from paceline.report.confusion import write_confusion

    png, json = _files(run)
    with writing(png.parent):
        png.parent.mkdir(exist_ok=True)
        return write_confusion(
            result.confusion.numpy(), result.class_names, png, json, result.snapshot.name
        )
