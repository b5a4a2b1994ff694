"""Names in a message are listed up to a number."""

import pytest

from paceline.gradient_sync.name_list import list_names


@pytest.mark.parametrize(
    ("names", "listed"),
    [([], ""), (["a"], "a"), (["a", "b"], "a, b"), (["a", "b", "c", "d"], "a, b and 2 more")],
)
def test_names_are_listed_up_to_a_number(names: list[str], listed: str) -> None:
    assert list_names(names, 2) == listed
