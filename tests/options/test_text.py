import io
import sys

import pytest

from paceline.options.text import (
    above_progress,
    clause,
    fitted,
    fitting,
    line_width,
    print_stderr,
    printable,
    shortened,
    wrapped,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 日本 👋\n\tlines", "plain, ünïcode, 日本 👋\n\tlines"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("a\rb\x00\x7f\x9b", r"a\x0db\x00\x7f\x9b"),
        (b"x\xe9".decode("utf-8", "surrogateescape"), r"x\xe9"),
        ("\ud800", r"\ud800"),
        ("exe.\u202egnp", r"exe.\u202egnp"),
    ],
)
def test_what_a_terminal_obeys_is_shown_instead(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).encode()  # by any stream
    assert printable(printable(text)) == shown


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("Use `wandb login` to log in.", "Use `wandb login` to log in"),
        (OSError("refused ... \n"), "refused"),
        ("version 2.13", "version 2.13"),
        (TimeoutError(), "TimeoutError"),
        ("first.\nsecond:", "first.\nsecond"),
        ("", "no message"),
    ],
)
def test_what_somebody_else_says_goes_into_a_sentence(said: object, shown: str) -> None:
    assert clause(said) == shown


def test_words_without_end_are_cut() -> None:
    assert shortened("say " + "9" * 5000 + " twice") == f"say {'9' * 100}… (5,000 characters) twice"
    assert shortened("/" + "p" * 300) == "/" + "p" * 300


HEADER = "Paceline 0.1.0: task.py:build on 2 workers (CPU, gloo)"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("short   words", "short   words"),
        (
            "a sentence that is longer than the line is",
            "a sentence that is longer than the line\n  is",
        ),
        (
            "it was stopped. Resume it: paceline resume runs/a --epochs 3",
            "it was stopped. Resume it:\n  paceline resume runs/a --epochs 3",
        ),
        (
            "  memory   461 kB on each worker: weights and gradients",
            "  memory   461 kB on each worker:\n           weights and gradients",
        ),
        (HEADER, "Paceline 0.1.0: task.py:build on 2\n                workers (CPU, gloo)"),
        (f"    {'a stack ' * 9}", f"    {'a stack ' * 9}"),
    ],
)
def test_words_are_wrapped_and_a_command_stays_whole(text: str, shown: str) -> None:
    assert fitted(text, 40) == shown
    assert fitted(f"{text}\n{text}", 40) == f"{shown}\n{shown}"


@pytest.mark.parametrize("figure", ["7 min 28 s", "1 h 2 min", "0.8 s", "12 ms", "461 kB", "3.6 %"])
def test_a_figure_stays_with_its_unit(figure: str) -> None:
    for width in range(20, 30):
        assert figure in "\n".join(wrapped(f"words before {figure}, and behind", width))


def test_what_somebody_else_says_is_not_wrapped() -> None:
    assert fitted("word " * 20, 40, prose=False) == "word " * 20


def test_terminals_alone_are_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    text, stream = "a sentence that is longer than the line", io.StringIO()
    assert fitting(text, stream) == above_progress(text, stream) == text
    assert fitting(text, None) == text
    assert line_width(80) == 80
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stream)
    lines = "a sentence that is longer than\n  the line"
    assert fitting(text, stream) == lines
    assert above_progress(text, stream) == f"\r\x1b[2K{lines}"  # over the ^C of Ctrl-C
    # Likewise over the progress, which another process shows.
    monkeypatch.setattr(sys, "stderr", stream)
    print_stderr(text)
    assert stream.getvalue() == f"\r\x1b[2K{lines}\n"
    assert (line_width(80), line_width(20)) == (30, 20)
