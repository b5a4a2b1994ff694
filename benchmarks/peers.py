"""Paceline against the libraries that people use for the same: Lightning, Accelerate and others.

    python -m benchmarks.peers [--quick] [--only WORDS] [--rounds N] [--python FILE] [--write]

Each side is one command that trains on two workers of one thread, by `paceline run` or torchrun;
the sides of a job take turns, in the opposite order in every second round. `--setup` first makes
an environment of their own for the others (build/peers, on top of this one); `--python` names
another. `--write` puts the table of speeds into README.md.
"""

import argparse
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.commands import ROOT
from benchmarks.figures import Report, markdown, median_figure, parser, ratios
from benchmarks.memory import watch
from benchmarks.peer_loops import JOBS, SIDES, WORKERS
from benchmarks.stamps import read_stamps

_ENVIRONMENT = ROOT / "build" / "peers"
_LIBRARIES = ("lightning", "accelerate", "transformers")
_OURS = "paceline"
_MARK = re.compile(r"(<!-- benchmarks\.peers -->\n).*?(<!-- end -->)", re.DOTALL)
_MB = 1e6


@dataclass(kw_only=True)
class Runs:
    """What the runs of one side came to."""

    samples_per_s: list[float] = field(default_factory=list)
    """Of all workers, from rank 0's first step to its last."""
    first_step_s: list[float] = field(default_factory=list)
    """From the command."""
    peak_mb: list[float] = field(default_factory=list)
    """Of the larger worker: memory, with its share of what it shares."""


def set_up() -> Path:
    """Make an environment with the other libraries; gives its Python."""
    python = _ENVIRONMENT / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(_ENVIRONMENT)], check=True)
    below = sysconfig.get_path("purelib", vars={"base": str(_ENVIRONMENT)})
    # What is installed here is found there, so that torch isn't loaded twice.
    here = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(below) / "below.pth").write_text(here)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *_LIBRARIES], check=True)
    return python


def command(side: str, job: str, python: str, stamps: Path, samples: int) -> Sequence[str]:
    """Write the command of one side."""
    words = (side, job, str(stamps), str(samples))
    if side.startswith(_OURS):
        run = ("--workers", str(WORKERS), "--threads", "1", "--run-dir", str(stamps / "run"))
        script = str(ROOT / "benchmarks" / "peer_loops.py")
        return (python, "-m", "paceline", "run", script, *run, "--", *words)
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}")
    return (python, "-m", *launcher, "-m", "benchmarks.peer_loops", *words)


def run_side(side: str, job: str, python: str, directory: Path, samples: int, runs: Runs) -> None:
    """Run a side once, and add what it came to."""
    stamps = Path(tempfile.mkdtemp(dir=directory))
    begun_s = stamps.stat().st_ctime
    peaks = watch(command(side, job, python, stamps, samples), stamps)
    (first,) = (stamp for stamp in read_stamps(stamps) if stamp.rank == 0 and stamp.steps)
    trained = (first.steps - 1) * samples / first.steps
    runs.samples_per_s.append(trained / (first.last_step_s - first.first_step_s))
    runs.first_step_s.append(first.first_step_s - begun_s)
    runs.peak_mb.append(max(peak.pss for peak in peaks) / _MB)


def versions(python: str) -> str:
    """Name the libraries of an environment with their versions."""
    code = (
        "from importlib.metadata import version\n"
        f"print(', '.join(f'{{n}} {{version(n)}}' for n in {_LIBRARIES!r}))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def measure(
    jobs: Sequence[str], rounds: int, python: str, part: int
) -> Mapping[str, Mapping[str, Runs]]:
    """Run all sides of all jobs, by turns.

    Args:
        jobs: Their names.
        rounds: Runs of each side.
        python: That has all libraries.
        part: One of so many parts of each job's samples is trained.
    """
    found = {job: {side: Runs() for side in SIDES} for job in jobs}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        for job in jobs:
            samples = JOBS[job][1] // part
            for number in range(rounds):
                for side in list(SIDES)[:: -1 if number % 2 else 1]:
                    run_side(side, job, python, Path(scratch), samples, found[job][side])
                speeds = (f"{s} {r.samples_per_s[-1]:,.0f}" for s, r in found[job].items())
                print(f"{job}, samples/s: {', '.join(speeds)}", flush=True)
    return found


def table(found: Mapping[str, Mapping[str, Runs]]) -> str:
    """Write how many samples a second each side has trained, as a Markdown table."""
    rows = []
    for side in SIDES:
        speeds = [statistics.median(runs[side].samples_per_s) for runs in found.values()]
        starts = [second for runs in found.values() for second in runs[side].first_step_s]
        first = f"{statistics.median(starts):.1f} s"
        rows.append((side, *(f"{speed:,.0f}" for speed in speeds), first))
    return markdown(("samples/s on 2 workers", *found, "first step after"), rows)


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), help="these jobs")
    made.add_argument("--rounds", type=int, help="runs of each side")
    made.add_argument("--setup", action="store_true", help="make the environment first")
    made.add_argument("--python", help="the Python of an environment that has the libraries")
    made.add_argument("--write", action="store_true", help="put the table into README.md")
    arguments = made.parse_args()
    if arguments.write and (arguments.quick or len(arguments.only) < len(JOBS)):
        made.error("--write is for all jobs, and not for --quick")
    python = _python(arguments)
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    found = measure(arguments.only, rounds, python, 8 if arguments.quick else 1)
    report = Report(
        name="peers", raw={j: {s: asdict(r) for s, r in found[j].items()} for j in found}
    )
    report.remarks = [f"{WORKERS} workers of 1 thread, fp32, Gloo; {versions(python)}"]
    for job, sides in found.items():
        ours = sides[_OURS]
        for side, runs in sides.items():
            what = f"{job}: {side}"
            note = f"first step {statistics.median(runs.first_step_s):.1f} s, "
            note += f"peak {statistics.median(runs.peak_mb):,.0f} MB"
            report.figures.append(median_figure(what, runs.samples_per_s, "samples/s", note=note))
            if side != _OURS:
                speeds = ratios(ours.samples_per_s, runs.samples_per_s)
                report.figures.append(median_figure(f"- {_OURS} / {side}", speeds, "x"))
    if arguments.write:
        readme = ROOT / "README.md"
        text = readme.read_text()
        readme.write_text(_MARK.sub(lambda m: f"{m[1]}{table(found)}\n{m[2]}", text))
    return report.finish(arguments)


def _python(arguments: argparse.Namespace) -> str:
    if arguments.setup:
        return str(set_up())
    usual = _ENVIRONMENT / "bin" / "python"
    return str(arguments.python or (usual if usual.exists() else sys.executable))


if __name__ == "__main__":
    raise SystemExit(main())
