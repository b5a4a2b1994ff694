"""The table of hashes: whole trainings on 1, 2, 3, 4, 5 and 8 workers, with and without shards.

    python -m benchmarks.same_bits [--quick] [--check]

Every line is a training of the digits recipe through `paceline train` (convolutions, BatchNorm,
Dropout, random shifts, a short last batch); the cells are the first digits of `weights_sha256`.
"Same bits" also compares `state_sha256` (optimizer, running statistics), the last epoch's
validation loss and accuracy, and the number of steps.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.commands import finish, start, train_command

WORLDS = (1, 2, 3, 4, 5, 8)
_DIGITS = 8

Options = Mapping[str, object]
NO_OPTIONS: Options = {}

_SGD: Options = {"clip_norm": 1.0, "warmup_epochs": 1}
LINES: Mapping[str, Options] = {
    "sgd, momentum, clipping, warm-up, V = 8": {**_SGD, "shards": 8},
    "the same, V = 16": {**_SGD, "shards": 16},
    "adamw, V = 8": {"optimizer": "adamw", "lr": 0.002, "shards": 8},
    "novograd, V = 8": {"optimizer": "novograd", "lr": 0.01, "shards": 8},
    "lamb, V = 8": {"optimizer": "lamb", "lr": 0.01, "shards": 8},
    "bf16, V = 8": {"precision": "bf16", "shards": 8},
    "accumulation (4 samples at once), V = 8": {"max_batch_per_worker": 4, "shards": 8},
    "without --shards": _SGD,
}
_QUICK = ("sgd, momentum, clipping, warm-up, V = 8", "without --shards")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one training ended with."""

    line: str
    workers: int
    weights_sha256: str
    state_sha256: str
    val_loss: float
    val_accuracy: float
    steps: int

    @property
    def bits(self) -> tuple[object, ...]:
        """All that has to be the same on any number of workers."""
        return tuple(value for name, value in asdict(self).items() if name != "workers")


def trained(line: str, workers: int, epochs: int, more: Options = NO_OPTIONS) -> Cell:
    """Train once through the command line: a line of `LINES`, with more options."""
    with tempfile.TemporaryDirectory() as scratch:
        run, output = Path(scratch) / "run", Path(scratch) / "output.txt"
        fixed: Options = {"workers": workers, "epochs": epochs, "target_accuracy": "none"}
        words = train_command("digits", run, **{**fixed, **LINES[line], **more})
        finish(start(words, output), output)
        summary = json.loads((run / "summary.json").read_text())
    names = ("weights_sha256", "state_sha256", "val_loss", "val_accuracy", "steps")
    return Cell(line=line, workers=workers, **{name: summary[name] for name in names})


def table(cells: Sequence[Cell], worlds: Sequence[int]) -> str:
    """Show the hashes as Markdown, a row for each line."""
    rows = [("training", *(f"{n} workers" if n > 1 else "1 worker" for n in worlds), "same bits")]
    rows.append(("---",) * len(rows[0]))
    for line in dict.fromkeys(cell.line for cell in cells):
        found = [cell for cell in cells if cell.line == line]
        shown = [f"`{cell.weights_sha256[:_DIGITS]}`" for cell in found]
        rows.append((line, *shown, "yes" if len({cell.bits for cell in found}) == 1 else "no"))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str]) -> int:
    """Run the command; 1 where `--check` finds bits that differ although they must not."""
    about = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    about.add_argument("--quick", action="store_true", help="two lines, 1, 2 and 3 workers")
    about.add_argument("--epochs", type=int, default=5)
    about.add_argument("--check", action="store_true", help="exit with 1 where a promise is broken")
    options = about.parse_args(arguments)
    lines, worlds = (_QUICK, WORLDS[:3]) if options.quick else (tuple(LINES), WORLDS)
    cells = [trained(line, workers, options.epochs) for line in lines for workers in worlds]
    print(table(cells, worlds))
    promised = [line for line in lines if "shards" in LINES[line]]
    broken = [n for n in promised if len({cell.bits for cell in cells if cell.line == n}) > 1]
    return 1 if options.check and broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
