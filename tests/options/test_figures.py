import pytest

from paceline.options.figures import plural, show_bytes, show_loss, show_rate


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0.0000"),
        (0.51234, "0.5123"),
        (12.34567, "12.3457"),
        (0.0012345, "0.00123"),
        (0.000012345, "1.23e-5"),
        (123.456789, "123.457"),
        (1.2345e9, "1.23e9"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_a_loss_keeps_three_digits_in_seven_characters(value: float, expected: str) -> None:
    assert show_loss(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.05, "0.05"), (1.0, "1"), (0.00125, "0.00125"), (0.00012345, "1.23e-4"), (1e-9, "1e-9")],
)
def test_a_rate(value: float, expected: str) -> None:
    assert show_rate(value) == expected


@pytest.mark.parametrize(
    ("amount", "expected"), [(0, "0 steps"), (1, "1 step"), (1234, "1,234 steps")]
)
def test_plural(amount: int, expected: str) -> None:
    assert plural(amount, "step") == expected


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_500, "1.5 kB"),
        (9_990, "10 kB"),
        (999_600, "1.0 MB"),
        (46_758_048, "47 MB"),
        (1.2e9, "1.2 GB"),
        (3.4e12, "3.4 TB"),
    ],
)
def test_bytes_have_at_most_three_digits(amount: float, expected: str) -> None:
    assert show_bytes(amount) == expected
