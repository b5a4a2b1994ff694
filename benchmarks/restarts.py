"""Twenty workers killed in a row, at random steps: each restart must work, and change nothing.

    python -m benchmarks.restarts [--quick] [--kills 20] [--json FILE]

A training of the digits recipe through `paceline train`, with snapshots every few steps. A random
worker is killed (SIGKILL) after a random number of steps of each generation of workers, also of
none. At the end the weights must be those of a training that nobody disturbed, bit for bit.
"""

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.commands import WORKERS, finish, start, train_command
from benchmarks.figures import Figure, Report, median_figure, parser
from benchmarks.stamps import Stamp, read_stamps, wait_until

_EVERY = 5
_MOST_STEPS = 40
_TIMEOUT_S = 120.0

Options = Mapping[str, object]
NO_OPTIONS: Options = {}
"""Of the training, besides those of every one."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One worker killed, and how long until training went on."""

    rank: int
    step: int
    """Optimizer steps that its generation had finished."""
    back_s: float
    """From the kill to the first optimizer step of the next generation, on rank 0."""


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """A training with kills."""

    kills: list[Kill]
    restarts: int
    weights_sha256: str


def command(directory: Path, epochs: int, options: Options = NO_OPTIONS) -> list[str]:
    """Write the command of a training whose stamps go into `directory`."""
    return train_command(
        "benchmarks.jobs:stamped_digits",
        directory / "run",
        stamps=directory,
        epochs=epochs,
        snapshot_every_steps=_EVERY,
        max_restarts=20,
        **options,
    )


def undisturbed(directory: Path, epochs: int, options: Options = NO_OPTIONS) -> str:
    """Train without a kill; give the weights' hash."""
    directory.mkdir()
    output = directory / "output.txt"
    finish(start(command(directory, epochs, options), output), output)
    return str(_summary(directory)["weights_sha256"])


def disturbed(
    directory: Path, epochs: int, kills: int, seed: int, options: Options = NO_OPTIONS
) -> Disturbed:
    """Train and kill workers; give what came of it."""
    directory.mkdir()
    output = directory / "output.txt"
    process = start(command(directory, epochs, options), output)
    draw = random.Random(seed)
    done = []
    try:
        for number in range(kills):
            victim, killed_s = _kill_one(process, directory, number, draw)
            _await(process, directory, number + 1, least_steps=1)
            back = _generation(directory, number + 1)[0]
            done.append(
                Kill(rank=victim.rank, step=victim.steps, back_s=back.first_step_s - killed_s)
            )
        finish(process, output)
    finally:
        process.kill()
        process.wait()
    summary = _summary(directory)
    return Disturbed(
        kills=done,
        restarts=int(str(summary["restarts"])),
        weights_sha256=str(summary["weights_sha256"]),
    )


def _kill_one(
    process: "subprocess.Popen[bytes]", directory: Path, generation: int, draw: random.Random
) -> tuple[Stamp, float]:
    """Wait for a random number of steps of a generation, then kill one of its workers."""
    least_steps, rank = draw.randrange(_MOST_STEPS + 1), draw.randrange(WORKERS)
    _await(process, directory, generation, least_steps)
    victim = _generation(directory, generation)[rank]
    killed_s = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    return victim, killed_s


def _await(
    process: "subprocess.Popen[bytes]", directory: Path, generation: int, least_steps: int
) -> None:
    def reached() -> bool:
        if process.poll() is not None:
            raise RuntimeError(
                f"the training ended in generation {generation}:\n"
                + (directory / "output.txt").read_text()[-4000:]
            )
        workers = _generation(directory, generation)
        return len(workers) == WORKERS and min(w.steps for w in workers) >= least_steps

    wait_until(reached, _TIMEOUT_S, f"step {least_steps} of generation {generation}")


def _generation(directory: Path, number: int) -> list[Stamp]:
    """List a generation's workers by rank; generations begin one after the other."""
    stamps = read_stamps(directory)[number * WORKERS : (number + 1) * WORKERS]
    return sorted(stamps, key=lambda stamp: stamp.rank)


def _summary(directory: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((directory / "run" / "summary.json").read_text())
    return content


def main() -> int:
    """Kill and report."""
    made = parser(__doc__ or "")
    made.add_argument("--kills", type=int, default=20)
    made.add_argument("--seed", type=int, default=0, help="of the random choices")
    arguments = made.parse_args()
    kills = 3 if arguments.quick else arguments.kills
    epochs = 3 * kills
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        wanted = undisturbed(Path(scratch) / "undisturbed", epochs)
        found = disturbed(Path(scratch) / "disturbed", epochs, kills, arguments.seed)
    report = Report(name="restarts", raw=asdict(found))
    report.remarks = [
        f"digits recipe, {WORKERS} workers of 1 thread, a snapshot every {_EVERY} steps; killed "
        f"at steps {', '.join(str(kill.step) for kill in found.kills)} of their generations",
        f"weights {found.weights_sha256[:16]}, undisturbed {wanted[:16]}",
    ]
    same = float(found.weights_sha256 == wanted)
    back = [kill.back_s for kill in found.kills]
    report.figures = [
        Figure(what="restarts that worked", value=found.restarts, unit="", at_least=kills),
        Figure(what="same weights as undisturbed (1 = yes)", value=same, unit="", at_least=1),
        median_figure("kill to first step of the next generation", back, "s"),
        Figure(what="- the slowest", value=max(back), unit="s"),
    ]
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
