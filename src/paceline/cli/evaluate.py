"""`paceline evaluate RUN_DIR`: evaluates a run's model and draws its confusion matrix."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.cli.output import Output, output_options, print_json
from paceline.distributed.options import DeviceKind
from paceline.errors import ExitCode, UsageError
from paceline.options.command_line import (
    note,
    read_command,
    snapshot_option,
)
from paceline.options.fields import OptionField
from paceline.options.figures import show_loss
from paceline.options.text import printable
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
    *output_options(
        "Print the figures alone, without those of each class.",
        "Also print which classes are taken for which.",
        "Print the figures as one JSON object on standard output.",
    ),
)
_MOST_MISTAKES = 10
_ABOUT = (
    "Print loss, top-1, top-5 and per-class accuracy of a run's model on the validation set, "
    "and write RUN_DIR/evaluation/confusion.png and .json."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    (where,), given = read_command(
        "paceline evaluate RUN_DIR", _ABOUT, tokens, _OPTIONS, "the run directory"
    )
    output, run = Output.take(given), RunDirectory.named(where)
    PreviousRun.read_recipe(run)  # before torch is loaded, and it is said which snapshot is taken
    from paceline.training.evaluation.evaluate_run import evaluate_run, find_snapshot

    arguments = {"data_dir": given["data_dir"]} if "data_dir" in given else {}
    device = cast(DeviceKind, given.get("device", "auto"))
    path = find_snapshot(run, str(given.get("snapshot", "best")), note)
    result = evaluate_run(run, path, arguments, device)
    files = _write_confusion(run, result) if result.class_names and result.totals.samples else ()
    if output.json:
        print_json(_as_json(result, files))
        return ExitCode.DONE
    _show_figures(result)
    if files and not output.quiet:
        _show_classes(result)
        if output.verbose:
            _show_mistakes(result)
        print("\nconfusion matrix  " + "\n                  ".join(map(str, files)))
    return ExitCode.DONE


def _as_json(result: "EvaluationResult", files: Sequence[Path]) -> Mapping[str, object]:
    totals, confusion = result.totals, result.confusion.numpy()
    by_class = []
    if files:
        from paceline.report.confusion import per_class_accuracy

        by_class = per_class_accuracy(confusion)
    return {
        "snapshot": str(result.snapshot),
        "step": result.step,
        "samples": totals.samples,
        "loss": _number(totals.mean_loss),
        "accuracy": _number(totals.accuracy) if result.top else None,
        "top5_accuracy": _number(totals.top5_accuracy) if result.top == 5 else None,
        "classes": [
            {"name": name, "accuracy": share, "samples": int(confusion[number].sum())}
            for number, (name, share) in enumerate(zip(result.class_names, by_class, strict=False))
        ],
        "confusion": [str(file) for file in files],
    }


def _number(value: float | None) -> float | None:
    """Give what JSON can carry: it has no NaN."""
    return value if value is not None and isfinite(value) else None


def _show_figures(result: "EvaluationResult") -> None:
    totals = result.totals
    print(f"snapshot  {result.snapshot.name} (step {result.step})")
    if not totals.samples:
        print("samples   none: the validation set is empty, so there is nothing to evaluate")
        return
    print(f"samples   {totals.samples}, each counted once")
    print(f"loss      {show_loss(totals.mean_loss)}")
    if result.top:
        print(f"top-1     {totals.accuracy:.2%}")
    if result.top == 5:
        print(f"top-5     {totals.top5_accuracy:.2%}")


def _show_classes(result: "EvaluationResult") -> None:
    confusion = result.confusion.numpy()
    shown = [printable(name) for name in result.class_names]
    width = max(5, *map(len, shown))
    print(f"\n{'class':{width}}  accuracy  samples")
    for number, name in enumerate(shown):
        samples = int(confusion[number].sum())
        share = f"{confusion[number, number] / samples:8.2%}" if samples else "       -"
        print(f"{name:{width}}  {share}  {samples:7d}")


def _show_mistakes(result: "EvaluationResult") -> None:
    """Print which classes are taken for which, the most frequent first."""
    names, counts = result.class_names, result.confusion.tolist()
    mistakes = [
        (amount, names[truth], names[answer])
        for truth, row in enumerate(counts)
        for answer, amount in enumerate(row)
        if amount and truth != answer
    ]
    print("\nmost frequent mistakes" if mistakes else "\nno mistakes")
    for amount, truth, answer in sorted(mistakes, reverse=True)[:_MOST_MISTAKES]:
        print(printable(f"{amount:7d}  {truth} taken for {answer}"))


def _write_confusion(run: RunDirectory, result: "EvaluationResult") -> Sequence[Path]:
    """Write the confusion matrix as a picture and as JSON. Returns the files."""
    from paceline.report.confusion import write_confusion

    directory = run.path / "evaluation"
    try:
        directory.mkdir(exist_ok=True)
        png, json = directory / "confusion.png", directory / "confusion.json"
        write_confusion(result.confusion.numpy(), result.class_names, png, json)
    except OSError as error:
        raise UsageError(f"{directory} can't be written: {error.strerror}") from error
    return png, json
