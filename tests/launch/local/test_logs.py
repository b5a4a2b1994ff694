import io
import sys
from pathlib import Path

import pytest

from paceline.errors import StorageError
from paceline.launch.local.logs import Tee, open_log, plain_line, read_crash, teed
from paceline.results.run_directory import log_path


def test_a_log_that_cannot_be_written_says_where_and_why(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(StorageError, match="logs can't be written: File exists"):
        open_log(tmp_path / "logs", 0, 1, 0)
    with pytest.raises(StorageError, match=r"logs/in can't be written: Not a directory"):
        open_log(tmp_path / "logs" / "in", 0, 1, 0)


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("epoch 1", "epoch 1"),
        ("\x1b[1;31mred\x1b[0m text", "red text"),
        ("10 %\r20 %\r\x1b[2K30 %", "30 %"),
        ("windows\r", "windows"),
        ("\x1b[?25lhidden", "hidden"),
    ],
)
def test_a_log_keeps_what_stays_visible(line: str, plain: str) -> None:
    assert plain_line(line) == plain


def test_a_tee_shows_everything_and_logs_whole_lines() -> None:
    terminal, log = io.StringIO(), io.StringIO()
    tee = Tee(terminal, log)
    for part in ("one", " line\ntwo", "\n", "\r10 %", "\r20 %", "\r\x1b[2Kdone\nrest"):
        tee.write(part)
    assert terminal.getvalue() == "one line\ntwo\n\r10 %\r20 %\r\x1b[2Kdone\nrest"
    assert log.getvalue() == "one line\ntwo\ndone\n"
    tee.finish()
    assert log.getvalue() == "one line\ntwo\ndone\nrest\n"


def test_a_redrawn_line_does_not_grow() -> None:
    tee = Tee(io.StringIO(), io.StringIO())
    for percent in range(1000):
        tee.write(f"\r{percent} %")
    assert len(tee._line) < 10


def test_a_tee_answers_as_its_terminal() -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    raw = io.BytesIO()
    terminal = Terminal(raw, encoding="latin-1", errors="replace")
    tee = Tee(terminal, io.StringIO())
    assert tee.isatty()
    assert (tee.encoding, tee.errors) == ("latin-1", "replace")
    tee.buffer.write(b"bytes")
    terminal.flush()
    assert raw.getvalue() == b"bytes"
    assert tee.writable()


def test_a_log_that_cannot_be_written_does_not_end_the_training() -> None:
    closed = io.StringIO()
    closed.close()
    terminal = io.StringIO()
    Tee(terminal, closed).write("still shown\n")
    assert terminal.getvalue() == "still shown\n"


def test_output_is_teed_in_a_block_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with open_log(tmp_path, 0, 1, 2) as log, teed(log):
        print("out")
        print("err", file=sys.stderr)
        print("unfinished", end="")
    assert (sys.stdout, sys.stderr) == before
    text = log_path(tmp_path, 0).read_text()
    assert text.startswith("---- attempt 2, rank 0 of 1, process ")
    assert text.endswith("out\nerr\nunfinished\n")
    assert capsys.readouterr() == ("out\nunfinished", "err\n")


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    for attempt in range(3):
        with open_log(tmp_path / "logs", 1, 2, attempt) as log:
            log.write(f"said in {attempt}\n")
    lines = log_path(tmp_path / "logs", 1).read_text().splitlines()
    assert [line for line in lines if line.startswith("said")] == [
        "said in 0",
        "said in 1",
        "said in 2",
    ]


def test_a_crash_is_read_from_the_last_attempt(tmp_path: Path) -> None:
    path = log_path(tmp_path, 0)
    with open_log(tmp_path, 0, 1, 0) as log:
        log.write("Fatal Python error: Segmentation fault\n\nold stack\n")
    assert read_crash(path) == "Fatal Python error: Segmentation fault\n\nold stack\n"
    with open_log(tmp_path, 0, 1, 1) as log:
        log.write("working\n")
    assert read_crash(path) == ""
    assert read_crash(tmp_path / "missing") == ""
