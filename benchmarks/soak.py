"""Random faults in whole trainings: resumed, each must end with the weights of an undisturbed one.

    python -m benchmarks.soak [--minutes 5] [--seed 0] [--only FAULT]

A run is a training of `paceline train` with `--shards` on one to three workers, in which one or
two faults happen at random steps, and which is resumed on other numbers of workers until it is
done. The weights must be those of one undisturbed process, bit for bit; each command must end with
the exit code that docs/reference/failures.md names; and no process may be left.
"""

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import psutil

from benchmarks.commands import finish, start, train_command
from benchmarks.stamps import Stamp, read_stamps

EPOCHS, SHARDS, EVERY = 6, 4, 7
"""Of every training: epochs, shards, and steps from one snapshot to the next."""
STEPS = EPOCHS * 23
_MOST_WORKERS = 3
_LIMIT_S, _LEFT_S = 240.0, 10.0
_DISK = "size=12m"
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


class BrokenPromiseError(Exception):
    """A command didn't end as documented; the message says how."""


class MissedError(Exception):
    """The command ended before the fault could happen."""


@final
class Training:
    """One training in a directory of its own; its commands run one after the other."""

    def __init__(self, room: Path, seed: int) -> None:
        self.room = room
        self.draw = random.Random(seed)
        self.disk = room / "disk"
        """Holds the run directory; a small file system of its own where a fault wants one."""
        self.run_dir = self.disk / "run"
        self.stamps = room / "stamps"
        self.output = room / "output.txt"
        self.codes: list[int] = []
        """Exit codes of its commands."""
        self.workers: list[int] = []
        """How many workers each command had."""
        self.disk.mkdir(parents=True)
        self.stamps.mkdir()

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the training, or resume it on another number of workers."""
        for path in self.stamps.iterdir():
            path.unlink()
        last = self.workers[-1] if self.workers else 0
        numbers = [n for n in range(1, _MOST_WORKERS + 1) if n != last]
        self.workers.append(self.draw.choice(numbers))
        words = train_command(
            "benchmarks.jobs:stamped_digits",
            self.run_dir,
            stamps=self.stamps,
            epochs=EPOCHS,
            shards=SHARDS,
            snapshot_every_steps=EVERY,
            workers=self.workers[-1],
        )
        if (self.run_dir / "run.json").exists():
            resume = ["resume", str(self.run_dir), "--workers", str(self.workers[-1])]
            words = [words[0], *resume, "--progress", "plain"]
        return start(words, self.output)

    def reach(self, process: "subprocess.Popen[bytes]") -> list[Stamp]:
        """Wait until all workers have taken a random number of steps; give their stamps.

        Raises:
            MissedError: The training ended before.
            BrokenPromiseError: It failed before.
        """
        steps = self.draw.randrange(max(1, STEPS - self.newest_step()))
        deadline_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline_s:
            found = read_stamps(self.stamps)
            if len(found) == self.workers[-1] and min(s.steps for s in found) >= steps:
                return found
            if process.poll() is not None:
                self.end(process, 0)
                raise MissedError
            time.sleep(0.001)
        raise BrokenPromiseError(f"no step {steps} within {_LIMIT_S:.0f} s")

    def end(self, process: "subprocess.Popen[bytes]", *codes: int) -> None:
        """Wait for the command's end, and compare its exit code with the documented ones.

        Raises:
            BrokenPromiseError: It hangs, ended otherwise, or left a process.
        """
        try:
            code = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise BrokenPromiseError(f"the command didn't end within {_LIMIT_S:.0f} s") from None
        self.codes.append(code)
        left = _processes_left()
        if code not in codes:
            wanted = " or ".join(map(str, codes))
            raise BrokenPromiseError(f"exit code {code} instead of {wanted}")
        if left:
            raise BrokenPromiseError(f"left after the command: {', '.join(left)}")

    def is_done(self) -> bool:
        """Tell whether the last command finished the training."""
        return bool(self.codes) and self.codes[-1] == 0

    def snapshots(self) -> list[Path]:
        """List the whole snapshots, oldest first."""
        found = self.run_dir.glob("snapshots/step-*")
        return sorted(path for path in found if path.name[5:].isdecimal())

    def newest_step(self) -> int:
        """Give the step of the newest snapshot."""
        return int(self.snapshots()[-1].name[5:]) if self.snapshots() else 0

    def weights(self) -> str:
        """Give the final weights' hash."""
        summary = json.loads((self.run_dir / "summary.json").read_text())
        return str(summary["weights_sha256"])


# Faults. Each runs one command, from its start to its end.


def _worker_killed(training: Training) -> None:
    """The supervisor starts all workers again from the newest snapshot."""
    process = training.start()
    _signal(training.draw.choice(training.reach(process)).pid, signal.SIGKILL)
    training.end(process, 0)


def _stopped(training: Training) -> None:
    """The workers finish a step and write a snapshot."""
    process = training.start()
    training.reach(process)
    process.terminate()
    training.end(process, 75, 0)
    if training.is_done():
        raise MissedError


def _supervisor_killed(training: Training) -> None:
    """Its workers must end with it."""
    process = training.start()
    training.reach(process)
    process.kill()
    training.end(process, -signal.SIGKILL)


def _node_killed(training: Training) -> None:
    """All of the machine's processes end at once, as when it loses power; its files stay."""
    process = training.start()
    training.reach(process)
    for one in (process.pid, *(p.pid for p in psutil.Process(process.pid).children(True))):
        _signal(one, signal.SIGKILL)
    training.end(process, -signal.SIGKILL)


def _torn_snapshot(training: Training) -> None:
    """A file of the newest snapshot is cut off while nothing runs; the one before counts."""
    _stopped(training)
    if len(training.snapshots()) < 2:
        raise MissedError
    path = training.draw.choice(sorted(training.snapshots()[-1].iterdir()))
    os.truncate(path, training.draw.randrange(path.stat().st_size))


def _full_disk(training: Training) -> None:
    """Nothing can be written to the run directory any more: worth a retry, once there is room."""
    small = not training.codes
    if small:
        mount = ["mount", "-t", "tmpfs", "-o", _DISK, "tmpfs", str(training.disk)]
        subprocess.run(mount, check=True, capture_output=True)
    process, filler = training.start(), training.disk / "filler"
    training.reach(process)
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while small:
            file.write(bytes(1 << 12))
    try:
        training.end(process, 70, 75, 0)
    finally:
        filler.unlink(missing_ok=True)
    if training.is_done():
        raise MissedError


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _can_mount() -> bool:
    words = "unshare --mount --propagation private mount -t tmpfs tmpfs /mnt"
    return subprocess.run(words.split(), capture_output=True, check=False).returncode == 0


FAULTS: Mapping[str, Callable[[Training], None]] = {
    "worker killed (SIGKILL)": _worker_killed,
    "SIGTERM": _stopped,
    "supervisor killed (SIGKILL)": _supervisor_killed,
    "all processes killed (SIGKILL)": _node_killed,
    "torn snapshot": _torn_snapshot,
    "full disk": _full_disk,
}
_FULL_DISK = "full disk"  # comes first in a run, which has a small disk then; needs root


@dataclass(kw_only=True)
class Record:
    """What happened in a run."""

    seed: int
    faults: list[str] = field(default_factory=list)
    """Those that happened."""
    missed: int = 0
    workers: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0


def run(room: Path, seed: int, names: Sequence[str], wanted: str) -> Record:
    """Train once with faults.

    Args:
        room: A directory that isn't there; it is kept if something is wrong.
        seed: Settles faults, moments and numbers of workers.
        names: Of the faults to draw from.
        wanted: The hash of the undisturbed training's weights.
    """
    training, record, began_s = Training(room, seed), Record(seed=seed), time.monotonic()
    drawn = training.draw.choices(names, k=training.draw.choice((1, 1, 2)))
    drawn.sort(key=lambda name: name != _FULL_DISK)
    try:
        for name in dict.fromkeys(drawn):
            if training.is_done():
                record.missed += 1
                continue
            try:
                FAULTS[name](training)
                record.faults.append(name)
            except MissedError:
                record.missed += 1
        while not training.is_done():
            training.end(training.start(), 0)
        if training.weights() != wanted:
            raise BrokenPromiseError(f"weights {training.weights()} instead of {wanted}")
    except BrokenPromiseError as error:
        record.problem = f"{error}; see {room}"
        record.faults = record.faults or list(drawn)
    record.workers, record.codes = training.workers, training.codes
    record.seconds = time.monotonic() - began_s
    _processes_left(0.0)
    if os.path.ismount(training.disk) and not record.problem:
        subprocess.run(["umount", str(training.disk)], check=True)
    if not record.problem:
        shutil.rmtree(room)
    return record


def undisturbed(directory: Path) -> str:
    """Train in one process that nothing disturbs; give the weights' hash."""
    training = Training(directory, 0)
    words = {"stamps": training.stamps, "epochs": EPOCHS, "shards": SHARDS, "workers": 1}
    command = train_command("benchmarks.jobs:stamped_digits", training.run_dir, **words)
    finish(start(command, training.output), training.output)
    return training.weights()


def _processes_left(limit_s: float = _LEFT_S) -> list[str]:
    """Name what still runs below this process after a moment, and end it."""
    deadline_s = time.monotonic() + limit_s
    while (left := _descendants()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    named = []
    for process in left:
        with suppress(psutil.Error):
            named.append(f"process {process.pid} ({' '.join(process.cmdline())[:120]})")
            process.kill()
    return named


def _descendants() -> list[psutil.Process]:
    """List what runs below this process, which adopts its descendants' orphans."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                process.wait(0.1)
            else:
                found.append(process)
    return found


def table(records: Sequence[Record]) -> str:
    """Show as Markdown how often each fault happened, and in how many runs without a problem."""
    happened = Counter(name for record in records for name in record.faults)
    good = Counter(name for r in records if not r.problem for name in r.faults)
    rows = [("fault", "happened", "ended as documented"), ("---", "---", "---")]
    rows += [(name, str(happened[name]), str(good[name])) for name in FAULTS if happened[name]]
    rows.append(("all", str(happened.total()), str(good.total())))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(words: Sequence[str]) -> int:
    """Run the command; 1 where a run didn't end as documented."""
    about = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    about.add_argument("--minutes", type=float, default=5.0, help="begin no run after these")
    about.add_argument("--seed", type=int, default=0, help="of the first run; each has the next")
    about.add_argument("--only", action="append", choices=FAULTS)
    asked = about.parse_args(words)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = asked.only or list(FAULTS)
    if _FULL_DISK in names and not _can_mount():
        print("left out: full disk (needs root, to mount a small one)")
        names = [name for name in names if name != _FULL_DISK]
    rooms = Path(tempfile.mkdtemp(prefix="paceline-soak-"))
    wanted = undisturbed(rooms / "undisturbed")
    records: list[Record] = []
    until_s = time.monotonic() + 60 * asked.minutes
    try:
        while not records or time.monotonic() < until_s:
            record = run(rooms / str(len(records)), asked.seed + len(records), names, wanted)
            records.append(record)
            how = " + ".join(record.faults) or "missed"
            told = f"on {record.workers} workers, exit codes {record.codes}"
            print(f"{record.seed:4d}  {how} ({told}; {record.seconds:.0f} s)", flush=True)
            if record.problem:
                again = f"python -m benchmarks.soak --seed {record.seed} --minutes 0"
                print(f"      FAILED: {record.problem}; again: {again}", flush=True)
    except KeyboardInterrupt:
        _processes_left(0.0)
    failed, missed = sum(bool(r.problem) for r in records), sum(r.missed for r in records)
    print(f"\n{table(records)}\n\nundisturbed weights {wanted[:16]}")
    good = f"{len(records) - failed} of {len(records)} runs ended as documented"
    print(f"{good}; {missed} faults missed")
    if not failed:
        shutil.rmtree(rooms)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
