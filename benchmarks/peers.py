"""Paceline against the libraries that people use for the same: Lightning, Accelerate and others.

    python -m benchmarks.peers [--quick] [--only JOB ..] [--sides WORDS] [--rounds N]
                               [--before DIR] [--setup] [--python FILE] [--write]

Each side is one command that trains on two workers of one thread, by `paceline run` or torchrun;
the sides of a job take turns, in the opposite order in every second round. `--setup` first makes
an environment of their own for the others (build/peers, on top of this one); `--python` names
another. `--before` names a worktree of an older commit with an environment of its own (`.venv`):
its Paceline trains the same loops as one more side. `--write` puts the table of speeds into
README.md.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.commands import ROOT, finish, start
from benchmarks.figures import Report, markdown, median_figure, parser, ratios
from benchmarks.peer_loops import JOBS, SIDES, WORKERS
from benchmarks.stamps import read_stamps

_ENVIRONMENT = ROOT / "build" / "peers"
_LIBRARIES = ("lightning", "accelerate", "transformers")
_NEEDS = {name.capitalize(): name for name in _LIBRARIES} | {"Fabric": "lightning"}
_OURS, _BEFORE = "paceline", "paceline, before"
_POLL_S = 0.1
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
    words = (_OURS if side == _BEFORE else side, job, str(stamps), str(samples))
    if side.startswith(_OURS):
        run = ("--workers", str(WORKERS), "--threads", "1", "--run-dir", str(stamps / "run"))
        script = str(ROOT / "benchmarks" / "peer_loops.py")
        return (python, "-m", "paceline", "run", script, *run, "--", *words)
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}")
    return (python, "-m", *launcher, "-m", "benchmarks.peer_loops", *words)


def watch(words: Sequence[str], stamps: Path, *source: Path) -> list[int]:
    """Run a command to its end; give the peak memory of each of its workers, in bytes."""
    output = stamps / "output.txt"
    process = start(words, output, *source)
    peaks: dict[int, int] = {}
    while process.poll() is None:
        for stamp in read_stamps(stamps):
            peaks[stamp.pid] = max(peaks.get(stamp.pid, 0), _proportional_bytes(stamp.pid))
        time.sleep(_POLL_S)
    finish(process, output)
    return list(peaks.values())


def _proportional_bytes(pid: int) -> int:
    """Read a process's memory with its share of what it shares; 0 when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    jobs: Sequence[str]
    sides: Sequence[str]
    rounds: int
    """Runs of each side."""
    python: str
    """That has all libraries."""
    before: Path | None
    """A worktree of an older commit, with its environment."""
    part: int
    """One of so many parts of each job's samples is trained."""


def run_side(side: str, job: str, plan: Plan, directory: Path, runs: Runs) -> None:
    """Run a side once, and add what it came to."""
    stamps = Path(tempfile.mkdtemp(dir=directory))
    begun_s, samples = stamps.stat().st_ctime, JOBS[job][1] // plan.part
    python, source = plan.python, ROOT / "src"
    if side == _BEFORE and plan.before is not None:
        python, source = str(plan.before / ".venv" / "bin" / "python"), plan.before / "src"
    peaks = watch(command(side, job, python, stamps, samples), stamps, source)
    (first,) = (stamp for stamp in read_stamps(stamps) if stamp.rank == 0 and stamp.steps)
    trained = (first.steps - 1) * samples / first.steps
    runs.samples_per_s.append(trained / (first.last_step_s - first.first_step_s))
    runs.first_step_s.append(first.first_step_s - begun_s)
    runs.peak_mb.append(max(peaks) / _MB)


def versions(python: str) -> Mapping[str, str]:
    """Give the versions of those other libraries that an environment has."""
    code = (
        "import json\n"
        "from importlib.metadata import distributions\n"
        "print(json.dumps({d.name.lower(): d.version for d in distributions()}))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    found: Mapping[str, str] = json.loads(done.stdout)
    return {name: found[name] for name in _LIBRARIES if name in found}


def measure(plan: Plan) -> Mapping[str, Mapping[str, Runs]]:
    """Run all sides of all jobs, by turns."""
    found = {job: {side: Runs() for side in plan.sides} for job in plan.jobs}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        for job in plan.jobs:
            for number in range(plan.rounds):
                for side in plan.sides[:: -1 if number % 2 else 1]:
                    run_side(side, job, plan, Path(scratch), found[job][side])
                speeds = (f"{s} {r.samples_per_s[-1]:,.0f}" for s, r in found[job].items())
                print(f"{job}, samples/s: {', '.join(speeds)}", flush=True)
    return found


def table(found: Mapping[str, Mapping[str, Runs]]) -> str:
    """Write how many samples a second each side has trained, as a Markdown table."""
    rows = []
    for side in next(iter(found.values())):
        speeds = [statistics.median(runs[side].samples_per_s) for runs in found.values()]
        starts = [second for runs in found.values() for second in runs[side].first_step_s]
        first = f"{statistics.median(starts):.1f} s"
        rows.append((side, *(f"{speed:,.0f}" for speed in speeds), first))
    return markdown(("samples/s on 2 workers", *found, "first step after"), rows)


def main() -> int:
    """Measure and report."""
    made = parser(__doc__ or "")
    made.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), help="these jobs")
    made.add_argument("--sides", default="", help="sides whose name has these words, and paceline")
    made.add_argument("--rounds", type=int, help="runs of each side")
    made.add_argument("--before", type=Path, metavar="DIR", help="a worktree of an older commit")
    made.add_argument("--setup", action="store_true", help="make the environment first")
    made.add_argument("--python", help="the Python of an environment that has the libraries")
    made.add_argument("--write", action="store_true", help="put the table into README.md")
    arguments = made.parse_args()
    is_whole = len(arguments.only) == len(JOBS) and not (arguments.sides or arguments.before)
    if arguments.write and (arguments.quick or not is_whole):
        made.error("--write is for all jobs and sides, and not for --quick or --before")
    python = _python(arguments)
    known = versions(python)
    left_out = [side for side, library in _NEEDS.items() if library not in known]
    sides = [s for s in SIDES if s not in left_out and (s == _OURS or arguments.sides in s)]
    plan = Plan(
        jobs=arguments.only,
        sides=[*sides, _BEFORE] if arguments.before else sides,
        rounds=arguments.rounds or (1 if arguments.quick else 5),
        python=python,
        before=arguments.before and arguments.before.resolve(),
        part=8 if arguments.quick else 1,
    )
    found = measure(plan)
    report = Report(
        name="peers", raw={j: {s: asdict(r) for s, r in found[j].items()} for j in found}
    )
    shown = ", ".join(f"{name} {version}" for name, version in known.items())
    report.remarks = [f"{WORKERS} workers of 1 thread, fp32, Gloo; {shown}"]
    report.remarks += [f"left out, not installed: {', '.join(left_out)}"] if left_out else []
    for job, found_of in found.items():
        ours = found_of[_OURS]
        for side, runs in found_of.items():
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
