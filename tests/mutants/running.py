"""Tries mutants: each in a copy of the source, its tests in a process forked from this one.

Torch and pytest are imported here, once; Paceline only in the forks, from the copy.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, final

import psutil
import pytest

from tests.mutants.listing import REPOSITORY, SOURCE, TESTS, Mutant

Verdict = Literal["caught", "timed out", "lived", "skipped", "broken"]

PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.elastic.multiprocessing",
    "torch.nn.parallel",
    "torchvision.transforms.v2",
    "hypothesis",
    "matplotlib.figure",
    "rich.console",
    "cyclopts",
    "jinja2",
)
"""What many tests import and takes long; nothing of Paceline."""
_ARGUMENTS = (
    "-x -q --no-header --tb=short -p no:cacheprovider --randomly-seed=1 -o timeout=0 "
    "--randomly-dont-reorganize -W ignore::pytest.PytestAssertRewriteWarning"
).split()
_POLL_S = 0.05
_OK, _NO_TESTS = pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a mutant, or of the tests without one."""

    mutant: Mutant | None
    verdict: Verdict
    time_s: float
    by: str
    """The test that failed; or the last lines of the output where no test was judged."""


@final
class _Counter:
    """A plugin of pytest that counts outcomes."""

    def __init__(self) -> None:
        self.passed, self.skipped, self.failed = 0, 0, ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a test's report in."""
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped
        if report.failed and not self.failed:
            self.failed = report.nodeid


@final
@dataclass(kw_only=True)
class _Slot:
    """A copy of the source, in which one mutant at a time is tried."""

    directory: Path
    mutant: Mutant | None = None
    pid: int = 0
    begun_s: float = field(default_factory=time.monotonic)

    @property
    def source(self) -> Path:
        return self.directory / "src"

    def begin(self, mutant: Mutant | None, tests: Sequence[str]) -> None:
        self.mutant, self.begun_s = mutant, time.monotonic()
        (self.directory / "outcome.json").unlink(missing_ok=True)
        if mutant is not None:
            path = self.source / "paceline" / mutant.file
            path.write_text(mutant.apply(path.read_text()))
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_pytest(tests)

    def _be_pytest(self, tests: Sequence[str]) -> NoReturn:
        code = 70
        try:
            os.setsid()
            output = os.open(self.directory / "output", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            scratch = self.directory / "tmp"
            scratch.mkdir(exist_ok=True)
            # Of the mutated file no byte code may be kept: it would serve the next mutant.
            os.environ |= {"PYTHONPATH": str(self.source), "PYTHONDONTWRITEBYTECODE": "1"}
            os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
            sys.dont_write_bytecode = True
            sys.path.insert(0, str(self.source))
            counter = _Counter()
            code = int(pytest.main([*_ARGUMENTS, *tests], plugins=[counter]))
            (self.directory / "outcome.json").write_text(json.dumps(vars(counter)))
        finally:
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(code)

    def end(self, status: int | None) -> Result:
        """Judge what has ended, or has been killed where there is no status; restore the file."""
        time_s = time.monotonic() - self.begun_s
        if self.mutant is not None:
            # With its times, so that the byte code beside it is valid again.
            original = SOURCE / self.mutant.file
            shutil.copy2(original, self.source / "paceline" / self.mutant.file)
        shutil.rmtree(self.directory / "tmp", ignore_errors=True)
        verdict, by = self._judge(status)
        return Result(mutant=self.mutant, verdict=verdict, time_s=time_s, by=by)

    def _judge(self, status: int | None) -> tuple[Verdict, str]:
        if status is None:
            return "timed out", ""
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.directory / "outcome.json").read_text())
            if code == 1 and found["failed"]:
                return "caught", found["failed"].removeprefix("tests/")
            if code in (_OK, _NO_TESTS):
                is_judged = found["passed"] or code == _NO_TESTS  # none of the core tier
                return ("lived", "") if is_judged else ("skipped", "")
        text = (self.directory / "output").read_text(errors="replace")
        return "broken", f"exit code {code}: " + " | ".join(text.strip().splitlines()[-3:])


def preload() -> None:
    """Import what the tests need and is slow, Paceline aside."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in PRELOAD:
        importlib.import_module(name)
    held = [name for name in sys.modules if name.split(".")[0] == "paceline"]
    assert not held, held


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How mutants are tried."""

    jobs: int = 2
    """How many at once."""
    limit_s: float = 120.0
    """What takes longer is killed."""
    core: bool = False
    """Whether only tests of the core tier count: what `make test` would notice."""


def run_all(
    tasks: Sequence[tuple[Mutant | None, Sequence[str]]], scratch: Path, terms: Terms
) -> Iterator[Result]:
    """Run the tests of each mutant, several mutants at once.

    Args:
        tasks: Mutants, or None for the source as it is; with the tests to run.
        scratch: An empty directory for the copies of the source.
        terms: How.
    """
    os.chdir(REPOSITORY)
    slots = [_Slot(directory=scratch / str(n)) for n in range(min(terms.jobs, len(tasks)))]
    for slot in slots:
        shutil.copytree(SOURCE, slot.source / "paceline")
    tier = ("-m", "core") if terms.core else ()
    waiting, free, busy = deque(tasks), list(slots), list[_Slot]()
    with _nothing_outlives(busy):
        while waiting or busy:
            while waiting and free:
                mutant, tests = waiting.popleft()
                busy.append(slot := free.pop())
                slot.begin(mutant, [*tier, *(str(TESTS / test) for test in tests)])
            time.sleep(_POLL_S)
            for slot in list(busy):
                late = time.monotonic() - slot.begun_s > terms.limit_s
                if late:
                    _kill(slot.pid)
                pid, status = os.waitpid(slot.pid, 0 if late else os.WNOHANG)
                if pid:
                    busy.remove(slot)
                    free.append(slot)
                    yield slot.end(None if late else status)


@contextmanager
def _nothing_outlives(busy: list[_Slot]) -> Iterator[None]:
    try:
        yield
    finally:
        for slot in busy:
            _kill(slot.pid)
            os.waitpid(slot.pid, 0)


def _kill(pid: int) -> None:
    """Kill a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        for process in (*psutil.Process(pid).children(recursive=True), psutil.Process(pid)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
