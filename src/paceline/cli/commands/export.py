"""`paceline export RUN_DIR FILE`: writes a run's weights for other programs."""

from collections.abc import Sequence
from pathlib import Path

from paceline.errors import ExitCode
from paceline.options.command_line import (
    ema_option,
    note,
    read_command,
    snapshot_option,
)
from paceline.options.fields import OptionField
from paceline.options.text import printable
from paceline.results.find_runs import RUN_OR_NAME, choose_run

_OPTIONS = (
    snapshot_option("Export"),
    ema_option("Export"),
    OptionField(
        name="overwrite",
        annotation=bool,
        default=False,
        help="Replace the file if it exists.",
        group="Export",
    ),
)
_ABOUT = (
    "Write a run's weights to FILE, by its suffix as .safetensors or as a PyTorch state dict "
    "(.pt, .pth), under the model's own names. "
    f"{RUN_OR_NAME}"
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    (where, file), given = read_command(
        "paceline export RUN_DIR FILE",
        _ABOUT,
        tokens,
        _OPTIONS,
        "the run directory",
        "the file to write",
    )
    run = choose_run(where)
    run.read_run()
    from paceline.checkpoint.export import export_weights
    from paceline.checkpoint.format import read_snapshot
    from paceline.training.evaluation.evaluate_run import find_snapshot
    from paceline.training.snapshots.model_weights import evaluated_weights

    path = find_snapshot(run, str(given.get("snapshot", "best")), note)
    held = read_snapshot(path).tensors
    ema = "ema" in held and bool(given.get("ema", True))
    tensors = evaluated_weights(held) if ema else held["model"]
    export_weights(tensors, Path(file).expanduser(), overwrite=bool(given.get("overwrite")))
    which = " (moving average of the weights)" if ema else ""
    print(printable(f"{len(tensors)} tensors of {path.name}{which} written to {file}"))
    return ExitCode.DONE
