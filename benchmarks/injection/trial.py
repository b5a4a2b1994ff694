"""One run from its first command to the last check, in a process of its own.

That process adopts what a training leaves behind, and where it may it has a mount namespace of its
own: an empty /dev/shm, and mounts that end with it. The driver and it talk by JSON.
"""

import ctypes
import json
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import ROOT, environment
from benchmarks.injection.checks import leftovers, problems_at_the_end
from benchmarks.injection.disk import mount, no_mounts
from benchmarks.injection.draw import Draw, Form
from benchmarks.injection.kind import Kind, do_both
from benchmarks.injection.table import KINDS
from benchmarks.injection.training import EPOCHS, BrokenPromiseError, MissedError, Training

_SHARED_MEMORY, _TEMPORARY = Path("/dev/shm"), Path("/mnt")
_RESUMES = 3
_LIMIT_S = 1200.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Record:
    """What came of a run."""

    number: int
    kinds: tuple[str, ...]
    """The faults that were done."""
    form: str
    workers: int
    codes: tuple[int, ...]
    """Of all its commands."""
    problems: tuple[str, ...]
    """Empty: all ended as documented."""
    missed: bool
    """Whether a fault came too late, so that the run says nothing about it."""
    seconds: float

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Record":
        """Read what `asdict` gave, through JSON."""
        lists = {name: tuple(content[name]) for name in ("kinds", "codes", "problems")}
        return Record(**{**content, **lists})


def run_apart(drawn: Draw, room: Path, wanted: str | None) -> Record:
    """Do a run in a process of its own.

    Args:
        drawn: The run.
        room: Its directory; new.
        wanted: The undisturbed `weights_sha256`; None: this is the undisturbed training.
    """
    room.mkdir()
    asked, answer = room / "asked.json", room / "record.json"
    asked.write_text(json.dumps({"drawn": asdict(drawn), "wanted": wanted}))
    alone = [] if no_mounts() else ["unshare", "--mount", "--propagation", "private"]
    words = [*alone, sys.executable, "-m", "benchmarks.injection.trial", str(room)]
    began_s = time.monotonic()
    told = room / "driver.txt"
    with told.open("wb") as file, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            words,
            cwd=ROOT,
            env=environment(),
            stdout=file,
            stderr=file,
            check=False,
            timeout=_LIMIT_S,
        )
    if answer.exists():
        return Record.from_json(json.loads(answer.read_text()))
    return Record(
        number=drawn.number,
        kinds=drawn.kinds,
        form=drawn.form,
        workers=drawn.workers,
        codes=(),
        problems=(f"the driver itself didn't come to its end: {told.read_text()}",),
        missed=False,
        seconds=time.monotonic() - began_s,
    )


def undisturbed(form: Form) -> Draw:
    """Give the run in which nothing happens."""
    return Draw(
        seed=0,
        number=-1,
        kinds=(),
        form=form,
        workers=1,
        rank=0,
        moment=0.5,
        delay_s=0.0,
        resume_on=(1,),
        loaders=0,
    )


def perform(training: Training, kinds: Sequence[Kind]) -> tuple[str, ...]:
    """Do the faults, then resume until the training is done; give those that came in time.

    Raises:
        BrokenPromiseError: Something wasn't as documented.
    """
    first, *more = kinds or (None,)
    done = list(kinds)
    if first is not None and more and first.strike and first.codes == (0,):
        if not do_both(training, first, more[0]):
            done.remove(more[0])
    else:
        for kind in kinds:
            kind.play(training)
    for _ in range(_RESUMES):
        if not training.is_done():
            training.start(held=False)
            training.end((0,))
    return tuple(kind.name for kind in done)


def _problems(training: Training, wanted: str | None) -> Sequence[str]:
    shared = [] if no_mounts() else [_SHARED_MEMORY]
    left = leftovers([training.temporary, *shared])
    return [
        *problems_at_the_end(training.run_dir, wanted, EPOCHS),
        *(f"left behind: {name}" for name in left),
    ]


def main(room: Path) -> int:
    """Do the run that `asked.json` in the room asks for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):  # which nohup and a shell's `&` have ignored
        signal.signal(number, signal.SIG_DFL)
    if not no_mounts():
        mount("-t", "tmpfs", "tmpfs", str(_SHARED_MEMORY))
        # A short path: a socket's has 103 bytes at most.
        mount("-t", "tmpfs", "tmpfs", str(_TEMPORARY))
    asked = json.loads((room / "asked.json").read_text())
    lists = {name: tuple(asked["drawn"][name]) for name in ("kinds", "resume_on")}
    drawn = Draw(**{**asked["drawn"], **lists})
    training = Training(room, drawn, room / "tmp" if no_mounts() else _TEMPORARY)
    problems: Sequence[str] = ()
    done, missed = drawn.kinds, False
    began_s = time.monotonic()
    try:
        done = perform(training, [KINDS[name] for name in drawn.kinds])
        problems = _problems(training, asked["wanted"])
    except MissedError as error:
        missed, problems = True, (str(error),)
    except BrokenPromiseError as error:
        problems = (str(error),)
    except Exception:  # noqa: BLE001  # the driver's own fault: told like the others
        problems = (traceback.format_exc(),)
    finally:
        training.kill()
        if training.run_dir.parent != room and training.run_dir.exists():
            shutil.copytree(training.run_dir, room / "copied", symlinks=True)
    record = Record(
        number=drawn.number,
        kinds=done,
        form=drawn.form,
        workers=drawn.workers,
        codes=tuple(ended.code for ended in training.ended),
        problems=tuple(problems),
        missed=missed,
        seconds=round(time.monotonic() - began_s, 1),
    )
    (room / "record.json").write_text(json.dumps(asdict(record), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
