import pytest

from paceline.errors import UsageError
from paceline.metrics.options import MetricsOptions


@pytest.mark.parametrize(
    ("given", "steps", "seconds"),
    [("auto", None, None), (50, 50, None), ("50", 50, None), ("5s", None, 5.0), ("1m", None, 60.0)],
)
def test_rows_are_asked_for_by_steps_or_by_time(
    given: int | str, steps: int | None, seconds: float | None
) -> None:
    options = MetricsOptions(log_every=given)
    assert (options.log_every_steps, options.log_every_s) == (steps, seconds)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (0, "at least 1 step"),
        (-3, "at least 1 step"),
        ("1.5", "or a time with its unit, such as 5s"),
        ("often", "or a time with its unit, such as 5s"),
        ("100 steps", "not a duration"),
        ("0.1s", r"at least 0\.5 s"),
    ],
)
def test_what_is_neither_is_refused(given: int | str, why: str) -> None:
    with pytest.raises(UsageError, match=f"--log-every is .*{why}"):
        MetricsOptions(log_every=given)
