import io
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.app import main as paceline
from paceline.cli.commands.workers import live_view, main, table_of
from paceline.errors import UsageError
from paceline.launch.watchdog.stragglers import live_path, remove_live, write_live
from paceline.results.run_directory import RunDirectory
from tests.launch.watchdog import states

_FAST = replace(states.FAST, step=1400)
_SLOW = replace(_FAST, rank=12, host="node1", compute_s=0.03, waiting_s=0.0, data_s=0.07)


def drawn(most: int) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    console.print(table_of([_SLOW, _FAST, replace(_FAST, rank=1)], most))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_table_fits_a_terminal_and_names_the_slow() -> None:
    lines = drawn(20)
    (slow,) = [line for line in lines if "node1" in line]
    assert slow.split() == "12 node1 1,400 10 30 30 % 0 0 % 70 70 % data".split()
    (first, _) = [line for line in lines if "node0" in line]
    assert first.split() == "0 node0 1,400 10 40 40 % 50 50 % 10 10 %".split()


def test_no_heading_is_cut_at_80_columns() -> None:
    columns = "rank host step steps/s computing waiting data slow by"
    assert columns in [" ".join(line.split()) for line in drawn(20)]


def test_ctrl_c_begins_no_line_of_its_own_below_a_table_as_wide_as_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    wide = replace(_SLOW, host="a-host-of-a-long-name.example.org")
    lines = console.render_lines(live_view([wide, _FAST], 20, Path()), pad=False)
    widths = [sum(segment.cell_length for segment in line) for line in lines]
    assert max(widths) > 78
    assert widths[-1] <= 78


def test_only_the_slowest_are_shown_of_many() -> None:
    lines = drawn(1)
    assert sum("node" in line for line in lines) == 1
    assert "and 2 faster ones" in "\n".join(lines)


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    assert main([str(tmp_path), "--once"]) == 0
    assert "No worker has finished steps" in capsys.readouterr().out
    write_live(live_path(logs), [_FAST])
    assert main([str(tmp_path), "--once"]) == 0
    assert "node0" in capsys.readouterr().out


def test_the_live_table_ends_with_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, seconds = tmp_path / "logs", []
    logs.mkdir()
    training = ExitStack()
    training.enter_context(RunDirectory(tmp_path).lock())

    def sleep(second: float) -> None:
        seconds.append(second)
        if len(seconds) == 1:
            write_live(live_path(logs), [_FAST])
        else:
            remove_live(live_path(logs))
            training.close()

    monkeypatch.setattr(time, "sleep", sleep)
    assert main([str(tmp_path)]) == 0
    assert len(seconds) >= 2
    assert "node0" in capsys.readouterr().out


def test_a_training_that_is_over_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    assert main([str(tmp_path)]) == 0
    assert "No training runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "there are no runs in .*runs. Name a run directory: paceline workers RUN_DIR"),
        (["--once"], "there are no runs in "),
        (["nowhere", "--once"], "there is no run directory nowhere"),
        ([".", "--most", "0", "--once"], "--most is 0"),
    ],
)
def test_misuse(
    tokens: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        main(tokens)


def test_help_imports_neither_torch_nor_needs_a_directory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert paceline(["workers", "--help"]) == 0
    assert "paceline workers [RUN_DIR]" in capsys.readouterr().out


def test_names_of_hosts_draw_nothing_else() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(table_of([replace(_FAST, host="[red]a\x1b[2J[/red]")], 20))
    assert isinstance(console.file, io.StringIO)
    assert r"[red]a\x1b[2J[/red]" in console.file.getvalue()
