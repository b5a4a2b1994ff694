"""Faults that a worker does to itself: it ends, raises, hangs, runs out of memory or files."""

import signal
from collections.abc import Sequence

from benchmarks.injection.cgroup import Cgroup, no_cgroup
from benchmarks.injection.kind import STARTS_AGAIN, Kind, inside, struck
from benchmarks.injection.training import Training

_BOOM = r"The training failed on rank \d.*boom"
_EXIT_0 = r"rank \d.*ended its process with exit code 0 before the end"
_NAN = r"became NaN or infinite at epoch \d.*on rank \d"
_HANGS = ("--hang-after-s", "6")
_HANG = r"The training hangs.*" + STARTS_AGAIN


def _kill_loader(training: Training) -> None:
    found: list[int] = []

    def look() -> bool:
        found[:] = training.relatives(training.worker())[1:]
        return bool(found)

    training.until(look, "a process that loads data")
    training.signal(signal.SIGKILL, found[0])


def _use_loaders(training: Training) -> None:
    training.options += ["--loader-workers", "1"]


def _limited(training: Training) -> None:
    cgroup = Cgroup.make(f"paceline-soak-{training.drawn.number}")
    cgroup.limit(_LIMIT_BYTES)
    training.cgroup = cgroup
    training.wrap = cgroup.wrap()


def _unlimited(training: Training) -> None:
    assert training.cgroup is not None
    training.wrap = []
    training.cgroup.remove()


_LIMIT_BYTES = 2800 << 20

KINDS: Sequence[Kind] = (
    inside("exit code 0 in the build", "exit 0", "build", codes=(65,), says=_EXIT_0),
    inside("exit code 0 in a step", "exit 0", "forward", codes=(65,), says=_EXIT_0),
    inside("exit code 1 in a step", "exit 1", "forward", says="exit code 1.*" + STARTS_AGAIN),
    inside("exit code 0 in the validation", "exit 0", "validation", codes=(65,), says=_EXIT_0),
    inside("sys.exit in a step", "sys.exit", "forward", codes=(65,), says=r"sys\.exit\(3\)"),
    inside("an exception in the build", "raise", "build", codes=(65,), says="boom"),
    inside("an exception in the model", "raise", "forward", codes=(65,), says=_BOOM),
    inside("an exception in the loss", "raise", "loss", codes=(65,), says=_BOOM),
    inside("an exception in the validation", "raise", "validation", codes=(65,), says=_BOOM),
    inside(
        "an exception in the data set", "raise", "sample", codes=(65,), says=_BOOM, form="script"
    ),
    inside("a MemoryError", "memory error", "forward", codes=(65,), says="MemoryError"),
    inside("a loss of NaN", "nothing", "loss", codes=(65,), says=_NAN),
    inside("a crash in C code", "crash", "step", says="SIGSEGV.*" + STARTS_AGAIN),
    inside(
        "Python's lock kept",
        "keep the lock",
        "forward",
        says=_HANG,
        options=_HANGS,
        least_workers=2,
    ),
    inside(
        "a collective of one rank's own",
        "one collective more",
        "forward",
        says=STARTS_AGAIN,
        options=_HANGS,
        least_workers=2,
    ),
    inside(
        "an allocation over RLIMIT_AS",
        "allocate too much",
        "forward",
        codes=(65,),
        says=r"The training failed on rank \d.*memory",
    ),
    inside(
        "killed for want of memory (cgroup)",
        "fill the memory",
        "step",
        says="(out|want) of memory.*" + STARTS_AGAIN,
        before=_limited,
        after=_unlimited,
        needs=no_cgroup,
    ),
    inside(
        "no more open files",
        "no more files",
        "step",
        codes=(0, 65, 70),
        says="Too many open files",
        rank=0,
    ),
    struck(
        "SIGKILL to a process that loads data",
        _kill_loader,
        before=_use_loaders,
        says=r"loader process \d+ ended by the signal SIGKILL.*" + STARTS_AGAIN,
        form="script",
    ),
)
