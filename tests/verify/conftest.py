"""Runs `paceline verify` in the test's process, on a fork server that many tests share."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.launch.local import forkserver
from paceline.verify.launches import PRELOAD


@dataclass(frozen=True)
class Verified:
    """How a verification ended."""

    code: int
    out: str
    err: str
    content: Mapping[str, object]
    """What --json wrote."""

    @property
    def words(self) -> str:
        """What was printed, without line breaks."""
        return " ".join(self.out.split())

    @property
    def causes(self) -> list[str]:
        """The causes of all findings, faults first."""
        findings = self.content["findings"]
        assert isinstance(findings, list)
        return [finding["cause"] for finding in findings]

    @property
    def verdicts(self) -> dict[int, str]:
        """The verdict on each number of workers."""
        workers = self.content["compared"]
        assert isinstance(workers, list)
        return {row["workers"]: row["verdict"] for row in workers}


Verify = Callable[..., Verified]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """Start it once; tests that use it are one xdist group, since others would take its place."""
    forkserver.prepare(PRELOAD, 1)
    try:
        yield
    finally:
        forkserver.release()


@pytest.fixture
def verify(
    tmp_path: Path,
    fork_server: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Verify:
    """Verify something in the test's own directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Verified:
        report = tmp_path / "found.json"
        place = words.index("--") if "--" in words else len(words)
        own = (*words[:place], "--threads", "1", "--json", str(report))
        code = main(["verify", *own, *words[place:]])
        told = capsys.readouterr()
        content = json.loads(report.read_text()) if report.exists() else {}
        report.unlink(missing_ok=True)
        return Verified(code, told.out, told.err, content)

    return run
