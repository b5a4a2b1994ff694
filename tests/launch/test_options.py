import pytest

from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from paceline.options.fields import option_fields


def test_every_option_is_described() -> None:
    names = [field.name for field in option_fields(LaunchOptions, "Launch")]
    assert names == [
        "workers",
        "threads",
        "numa_affinity",
        "max_restarts",
        "hang_after_s",
        "stop_grace_s",
        "on",
    ]


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"workers": 0}, "--workers is 0"),
        ({"threads": -1}, "--threads is -1"),
        ({"max_restarts": -1}, "--max-restarts is -1"),
        ({"hang_after_s": -1.0}, "--hang-after-s is -1"),
        ({"stop_grace_s": 0.0}, "--stop-grace-s is 0"),
        ({"hang_after_s": float("inf")}, "--hang-after-s is inf"),
    ],
)
def test_counts_out_of_range_are_refused(options: dict[str, float], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        LaunchOptions(**options)  # type: ignore[arg-type]


def test_no_restarts_is_a_choice() -> None:
    assert LaunchOptions(max_restarts=0).max_restarts == 0
