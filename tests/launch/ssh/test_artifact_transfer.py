import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.launch.ssh import agent_io, artifact_transfer
from paceline.launch.ssh.artifact_transfer import ArtifactTransfer, end_of_log, keep_file, pieces
from paceline.launch.ssh.protocol import Message
from paceline.results.run_directory import RunDirectory

LONG = "".join(f"line {n}: naïve \N{SNOWMAN}\n" for n in range(20_000)).encode()


@pytest.fixture
def home(tmp_path: Path) -> RunDirectory:
    """Give the launcher's run directory."""
    return RunDirectory.named(tmp_path / "home")


def keep(run: RunDirectory, messages: Sequence[Message]) -> list[str]:
    return [problem for message in messages if (problem := keep_file(run, message))]


def files_in(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def test_files_come_over_in_pieces_and_whole(
    home: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = RunDirectory.named(tmp_path / "there")
    there.logs.mkdir(parents=True)
    there.run_json.write_text("{}")
    there.metrics_csv.write_bytes(LONG * 20)  # longer than a log may be
    there.steps_csv.write_bytes(LONG * 20)
    there.summary_json.touch()
    there.rank_log(3).write_bytes(LONG)
    there.rank_log(4).write_text("not this host's")
    told: list[Message] = []
    monkeypatch.setattr(agent_io, "send", told.append)
    with ArtifactTransfer(there, [3], leads=True).running():
        pass
    longest = max(len(str(message["text"]).encode()) for message in told)
    assert longest <= 64 * 1024 + 3  # with the rest of a character
    assert keep(home, told) == []
    assert files_in(home.path) == [
        "logs/rank-3.log",
        "metrics.csv",
        "run.json",
        "steps.csv",
        "summary.json",
    ]
    for name in files_in(home.path):
        assert (home.path / name).read_bytes() == (there.path / name).read_bytes()


def test_a_reader_never_sees_a_part(home: RunDirectory) -> None:
    (first, *_), whole = list(pieces("metrics.csv", LONG)), b"before"
    home.path.mkdir()
    home.metrics_csv.write_bytes(whole)
    assert keep_file(home, first) == ""
    assert home.metrics_csv.read_bytes() == whole
    assert keep(home, list(pieces("metrics.csv", LONG))) == []  # another host begins anew
    assert home.metrics_csv.read_bytes() == LONG
    assert files_in(home.path) == ["metrics.csv"]


def test_a_piece_that_is_missing_is_told(home: RunDirectory) -> None:
    first, _, *rest = pieces("metrics.csv", LONG)
    assert "metrics.csv can't be written: " in keep(home, [first, *rest])[0]
    assert files_in(home.path) == []


def test_a_long_log_is_cut_at_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\nsecond\nthird\n")
    assert end_of_log(log, 100) == b"first\nsecond\nthird\n"
    assert end_of_log(log, 9) == b"third\n"
    log.write_bytes(b"x" * 20)
    assert end_of_log(log, 9) == b"x" * 9


@pytest.mark.parametrize(
    "name",
    [
        "../run.json",
        "/etc/passwd",
        "logs/../run.json",
        "logs/rank-.log",
        "logs/rank-1.log.sh",
        "logs/rank-1/x.log",
        "logs/failure-rank-1.json\n",
        "rank-1.log",
        "run.lock",
        "snapshots/step-1",
        "",
    ],
)
def test_no_other_file_is_written(home: RunDirectory, tmp_path: Path, name: str) -> None:
    assert keep(home, list(pieces(name, b"bad"))) == []
    assert files_in(tmp_path) == []


def test_a_disk_that_is_full_is_told_and_ends_nothing(
    home: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifact_transfer, "write_atomic", refuse)
    for content in (b"short", LONG):
        (problem,) = keep(home, list(pieces("run.json", content)))
        assert problem.startswith(f"{home.run_json} can't be written: ")
        assert "No space left" in problem
    assert files_in(home.path) == []


def test_links_are_not_followed(home: RunDirectory, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    home.path.mkdir()
    home.metrics_csv.symlink_to(other)
    (home.path / ".metrics.csv.partial").symlink_to(other)
    assert keep(home, list(pieces("metrics.csv", LONG))) == []
    assert other.read_text() == "precious"
    assert home.metrics_csv.read_bytes() == LONG
