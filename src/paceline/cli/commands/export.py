"""`paceline export RUN_DIR FILE`: writes a run's weights for other programs."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ExitCode
from paceline.options.command_line import ModelOptions, note, read_command
from paceline.options.fields import option_fields, pick
from paceline.options.text import fitting, printable
from paceline.results.find_runs import RUN_OR_NAME, choose_run

_ABOUT = (
    "Write a run's weights to FILE, by its suffix as .safetensors or as a PyTorch state dict "
    "(.pt, .pth), under the model's own names. "
    f"{RUN_OR_NAME}"
)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How the file is written."""

    overwrite: bool = False
    """Replace the file if it exists."""


_OPTIONS = (*option_fields(ModelOptions, "Export"), *option_fields(ExportOptions, "Export"))


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
    which, own = pick(ModelOptions, given), pick(ExportOptions, given)
    run = choose_run(where)
    run.read_run()
    from paceline.checkpoint.export import export_weights
    from paceline.checkpoint.format import read_snapshot
    from paceline.training.evaluation.evaluate_run import find_snapshot
    from paceline.training.snapshots.model_weights import evaluated_weights

    # Take the weights that evaluation uses: the moving average, unless --no-ema.
    path = find_snapshot(run, which.snapshot, note)
    held = read_snapshot(path).tensors
    ema = "ema" in held and which.ema
    tensors = evaluated_weights(held) if ema else held["model"]
    export_weights(tensors, Path(file).expanduser(), overwrite=own.overwrite)
    of_what = " (moving average of the weights)" if ema else ""
    done = f"{len(tensors)} tensors of {path.name}{of_what} written to {file}"
    print(fitting(printable(done), sys.stdout))
    return ExitCode.DONE
