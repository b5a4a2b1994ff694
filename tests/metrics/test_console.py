import io
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from paceline.metrics import console
from paceline.metrics.console import (
    Advance,
    BarConsole,
    Communication,
    Console,
    EpochTable,
    PlainConsole,
    SilentConsole,
    make_console,
)
from paceline.options.text import in_column
from paceline.results.metrics_table import EpochRow
from tests.launch.waiting import until

ADVANCE = Advance(
    epoch=2,
    epochs=5,
    step=30,
    steps=120,
    loss=0.51234,
    accuracy=0.8765,
    images_per_s=12345.6,
    lr=0.05,
    eta_s=75.0,
)
ROW = EpochRow(
    epoch=1,
    step=120,
    time_s=61.0,
    train_loss=0.5,
    train_accuracy=0.75,
    val_loss=0.25,
    val_accuracy=0.9875,
    lr=0.1,
    images_per_s=1234.5,
)


class Terminal(io.StringIO):
    """Standard output on a terminal."""

    def isatty(self) -> bool:
        return True


def show(shown: Console) -> None:
    shown.say("opening")
    for epoch in (1, 2):
        for step in (30, 60):
            shown.advance(replace(ADVANCE, epoch=epoch, step=step))
        shown.epoch(replace(ROW, epoch=epoch), "images")
    shown.close()
    shown.close()


def terminal_of(width: int, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Give a terminal of so many columns that takes what is shown."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "__stdout__", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    return terminal


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def table_of(*rows: EpochRow) -> list[str]:
    table = EpochTable()
    return [line for row in rows for line in table.lines(row, "images")]


EXPECTED = ["opening", *(line.rstrip() for line in table_of(ROW, replace(ROW, epoch=2)))]


def test_one_line_of_progress() -> None:
    assert ADVANCE.text() == "loss 0.5123  acc 87.65 %  12,346 img/s  lr 0.05  ETA 1:15"
    assert "acc" not in replace(ADVANCE, accuracy=None).text()


def test_a_loop_of_unknown_length_shows_what_is_known() -> None:
    free = replace(ADVANCE, step=30, steps=0, images_per_s=0.0)
    assert free.text() == "loss 0.5123  acc 87.65 %  lr 0.05  ETA 1:15"
    assert (free.position(), ADVANCE.position()) == ("step 30", "30/120")


def test_the_table_has_the_columns_that_have_figures() -> None:
    header, line = table_of(ROW)
    assert header.split()[-1] == "img/s"
    assert "top-5" not in header
    assert line.split() == [
        "1",
        "120",
        "1:01",
        "0.5000",
        "75.00",
        "0.2500",
        "98.75",
        "0.1",
        "1,234",
    ]
    assert len(header) == len(line)
    assert "top-5" in table_of(replace(ROW, val_top5_accuracy=1.0))[0]
    assert "acc" not in table_of(replace(ROW, train_accuracy=None, val_accuracy=None))[0]


def test_samples_that_are_no_images_are_called_samples() -> None:
    assert "  12,346 samples/s  " in replace(ADVANCE, unit="samples").text()
    header, line = EpochTable().lines(ROW, "samples")
    assert header.split()[-1] == "samples/s"
    assert len(header) == len(line) <= 79


def test_an_epoch_without_validation_leaves_its_columns_empty() -> None:
    bare = replace(ROW, epoch=2, val_loss=None, val_accuracy=None)
    header, first, second = table_of(ROW, bare)
    assert len(header) == len(first) == len(second)
    column = slice(header.index("val loss"), header.index("lr") - 5)
    assert first[column].split() == ["0.2500", "98.75"]
    assert second[column].strip() == ""
    assert first[column.stop :] == second[column.stop :]


def test_a_column_that_comes_later_has_a_header_of_its_own() -> None:
    bare = replace(ROW, val_loss=None, val_accuracy=None)
    before, _, after, _ = table_of(bare, replace(ROW, epoch=2))
    assert "val loss" not in before
    assert "val loss" in after
    shown = EpochTable(has_header=True)
    assert len(shown.lines(ROW, "images")) == 1  # the header stands above, from before a restart


@pytest.mark.parametrize("width", [30, 60])
def test_a_narrow_terminal_goes_without_the_least_important_columns(width: int) -> None:
    table, row = EpochTable(), replace(ROW, val_top5_accuracy=1.0)
    header, line = table.lines(row, "images", width)
    assert len(header) == len(line) <= width
    assert header.split()[0] == "epoch"
    assert "val acc %" in header
    assert "top-5" not in header
    assert len(table.lines(row, "images", width)) == 1
    header, line = table.lines(row, "images", 80)  # it was made wider
    assert "top-5" in header


def test_the_whole_table_fits_a_terminal_of_80_columns() -> None:
    row = EpochRow(
        epoch=1000,
        step=1234567,
        time_s=35999.0,
        train_loss=0.0000123456,
        train_accuracy=1.0,
        val_loss=12.3456,
        val_accuracy=1.0,
        val_top5_accuracy=1.0,
        lr=0.000123456,
        images_per_s=123456.0,
    )
    header, line = table_of(row)
    assert "1.23e-5" in line
    assert len(header) == len(line) <= 79


def test_the_bar_uses_the_room_there_is() -> None:
    for width in range(46, 200):
        line = ADVANCE.bar_line(width)
        assert ("━" in line) == (width >= 64)
        assert len(line) <= width
        assert "2/5" in line
        assert "30/120" in line
        assert "loss 0.5123" in line
        assert line.endswith("ETA 1:15")
    text = ADVANCE.text()
    assert ADVANCE.bar_line(120) == f"epoch 2/5 {'━' * 6}{'─' * 18}  30/120 {text}"
    assert ADVANCE.bar_line(120, plain=True) == f"epoch 2/5 {'#' * 6}{'-' * 18}  30/120 {text}"


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (76, "loss 0.5123 acc 87.65 % 12,346 img/s lr 0.05 ETA 1:15"),
        (60, "loss 0.5123 acc 87.65 % 12,346 img/s ETA 1:15"),
        (10, "loss 0.5123 ETA 1:15"),
    ],
)
def test_a_narrow_terminal_shows_whole_figures(width: int, figures: str) -> None:
    assert ADVANCE.bar_line(width).endswith(f"30/120 {figures}")


@pytest.mark.parametrize(
    ("width", "figures"),
    [
        (100, "img/s comm 12 % 1.2 GB/step lr 0.05 ETA 1:15"),
        (80, "─────  30/120 loss 0.5123 acc 87.65 % 12,346 img/s comm 12 % ETA 1:15"),
        (60, "acc 87.65 % 12,346 img/s ETA 1:15"),
    ],
)
def test_several_workers_see_what_communication_costs(width: int, figures: str) -> None:
    spent = Communication(exposed=0.1, waiting=0.021, wire_bytes=1.2e9)
    line = replace(ADVANCE, spent=spent).bar_line(width)
    assert len(line) <= width
    assert line.endswith(figures)


def test_a_training_of_unknown_length_has_no_eta() -> None:
    assert "ETA" in ADVANCE.bar_line(100)
    assert "ETA" not in replace(ADVANCE, steps=0, eta_s=None).bar_line(100)


def test_figures_stay_where_they_are_while_they_change() -> None:
    lines, widths = [], {"loss": 12, "speed": 14, "left": 11}
    for step, loss, speed, eta_s in ((9, 0.5, 999.0, 9.0), (100, 1234.5, 123456.0, 3601.0)):
        now = replace(ADVANCE, step=step, loss=loss, images_per_s=speed, eta_s=eta_s)
        lines.append(now.bar_line(100, widths=widths))
    first, second = lines
    for name in ("/120", "loss", "acc", "lr", "ETA"):
        assert first.index(name) == second.index(name)


def test_an_evaluation_has_a_bar_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    monkeypatch.setattr(sys, "__stdout__", terminal)
    shown = BarConsole(tmp_path / "rank-0.log")
    drawn: list[str] = []
    monkeypatch.setattr(shown, "_show", drawn.append)
    shown.advance(ADVANCE)
    shown.evaluating("epoch 2/5 validation", 3, 12)
    shown.evaluating("epoch 2/5 validation", 3, 0)
    shown.close()
    place = f"epoch 2/5 validation {'━' * 6}{'─' * 18}"
    assert drawn[1:] == [f"{place}  3/12", "epoch 2/5 validation batch 3"]
    assert drawn[0].rstrip() in terminal.getvalue()  # what a stopped epoch leaves is the training's


def test_plain_progress_of_an_evaluation_after_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    plain = PlainConsole()
    plain.evaluating("test", 3, 12)
    now[0] += 10.0
    plain.evaluating("test", 4, 12)
    plain.evaluating("test", 5, 12)
    assert capsys.readouterr().out == "test   4/12\n"


def test_what_its_gpu_does_where_there_is_room() -> None:
    both = replace(ADVANCE, gpu_utilization=0.87, gpu_memory_bytes=61_200_000_000)
    assert both.bar_line(100).endswith("12,346 img/s  GPU 87 % 61 GB  lr 0.05  ETA 1:15")
    assert both.bar_line(75).endswith("12,346 img/s lr 0.05 ETA 1:15")
    assert "  GPU 61 GB  " in replace(both, gpu_utilization=None).text()
    assert "  GPU  3 %  " in replace(ADVANCE, gpu_utilization=0.03).text()


def test_plain_lines_with_one_header_and_no_progress_within_ten_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(PlainConsole())
    assert lines_of(capsys.readouterr().out) == EXPECTED


def test_plain_progress_after_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    plain = PlainConsole()
    plain.advance(ADVANCE)
    now[0] += 10.0
    plain.advance(ADVANCE)
    plain.advance(ADVANCE)
    assert capsys.readouterr().out == f"epoch 2/5  30/120  {ADVANCE.text()}\n"


def test_silence_but_for_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    show(SilentConsole())
    assert capsys.readouterr().out == ""
    SilentConsole().warn("the disk is full")
    assert capsys.readouterr().out == "the disk is full\n"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "  data      digits: 1,442 images; 355 for validation",
            "  data      digits: 1,442 images; 355\n            for validation",
        ),
        ("  run       /a/long/path/that/no-terminal/shows", None),
        ("a warning that is longer than the terminal is wide", None),
        ("  short     line", None),
    ],
)
def test_a_long_line_of_the_header_stays_in_its_column(line: str, shown: str | None) -> None:
    assert in_column(line, 40) == (shown or line)


def test_the_bar_shows_each_line_once_and_logs_all_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, log = terminal_of(160, monkeypatch), tmp_path / "rank-0.log"
    show(BarConsole(log))
    assert lines_of(log.read_text()) == EXPECTED
    for line in EXPECTED:
        assert terminal.getvalue().count(line) == 1


def test_the_bar_goes_away_and_the_last_figures_of_a_stopped_epoch_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, log = terminal_of(160, monkeypatch), tmp_path / "rank-0.log"
    bar = BarConsole(log)
    bar.advance(ADVANCE)
    line = ADVANCE.bar_line(160, widths=console._USUAL_WIDTHS)
    until(lambda: line in terminal.getvalue())  # drawn by a thread
    bar.close()
    assert "epoch 2/5" in terminal.getvalue()
    assert log.read_text() == f"{line}\n"
    # They stand on a line of their own, and the bar below it is erased.
    bar_after = terminal.getvalue().rpartition(f"\x1b[2K{line}\n")[2]
    assert bar_after.rstrip().endswith("\x1b[2K\x1b[?25h")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colour_is_for_terminals_whose_user_wants_it(
    no_color: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, log = terminal_of(160, monkeypatch), tmp_path / "rank-0.log"
    monkeypatch.setenv("NO_COLOR", no_color)
    show(BarConsole(log))
    assert ("\x1b[1;36m" in terminal.getvalue()) is not bool(no_color)  # the header: bold cyan
    assert "\x1b" not in log.read_text()


@pytest.mark.parametrize(
    ("kind", "rank", "terminal", "expected"),
    [
        ("auto", 0, True, BarConsole),
        ("auto", 0, False, PlainConsole),
        ("plain", 0, True, PlainConsole),
        ("off", 0, True, SilentConsole),
        ("bar", 1, True, SilentConsole),
    ],
)
def test_which_console(
    kind: Literal["auto", "bar", "plain", "off"],
    rank: int,
    terminal: bool,
    expected: type[Console],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "__stdout__", Terminal() if terminal else io.StringIO())
    assert type(make_console(kind, rank, tmp_path / "log")) is expected


@pytest.mark.parametrize("make", [PlainConsole, SilentConsole])
def test_an_output_that_cannot_be_written_is_no_error(
    make: type[Console], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115  # can't be closed in order
    monkeypatch.setattr(sys, "stdout", full)
    make().warn("said")
    with suppress(OSError):
        full.close()
    make().warn("said to a closed stream")


def test_warnings_are_wrapped_and_what_a_user_prints_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = terminal_of(40, monkeypatch)
    line = "words of a sentence that is longer than the terminal"
    bar = BarConsole(tmp_path / "rank-0.log")
    bar.warn(line)
    bar.say(line)
    bar.close()
    assert "words of a sentence that is longer than\n  the terminal\n" in terminal.getvalue()
    assert f"{line}\n" in terminal.getvalue()
    assert (tmp_path / "rank-0.log").read_text() == f"{line}\n{line}\n"
