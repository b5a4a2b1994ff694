import pytest

from paceline.options.text import printable, shortened


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


def test_words_without_end_are_cut() -> None:
    assert shortened("say " + "9" * 5000 + " twice") == f"say {'9' * 100}… (5,000 characters) twice"
    assert shortened("/" + "p" * 300) == "/" + "p" * 300
