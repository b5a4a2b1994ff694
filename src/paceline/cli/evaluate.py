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
from paceline.options.figures import show_loss
from paceline.options.text import printable
from paceline.results.run_directory import RunDirectory
from paceline.training.previous_run import PreviousRun

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
    "Print loss, top-1, top-5 and per-class accuracy of a run's model on the validation set, "
    "and write RUN_DIR/evaluation/confusion.png and .json."
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
        _show_classes(run, result.confusion.numpy(), result.class_names)
    return ExitCode.DONE


def _show_classes(run: RunDirectory, confusion: "NDArray[np.int64]", names: Sequence[str]) -> None:
    from paceline.report.confusion import write_confusion

    shown = [printable(name) for name in names]
    width = max(5, *map(len, shown))
    print(f"\n{'class':{width}}  accuracy  samples")
    for number, name in enumerate(shown):
        samples = int(confusion[number].sum())
        share = f"{confusion[number, number] / samples:8.2%}" if samples else "       -"
        print(f"{name:{width}}  {share}  {samples:7d}")
    directory = run.path / "evaluation"
    try:
        directory.mkdir(exist_ok=True)
        png, json = directory / "confusion.png", directory / "confusion.json"
        write_confusion(confusion, names, png, json)
    except OSError as error:
        raise UsageError(f"{directory} can't be written: {error.strerror}") from error
    print(f"\nconfusion matrix  {png}\n                  {json}")
