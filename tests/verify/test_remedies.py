"""Every cause has advice, and the page on `paceline verify` has an example of it."""

from pathlib import Path

import pytest

from paceline.verify.finding import ALIKE, NOTES, Cause
from paceline.verify.remedies import ADVICE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verify.md"


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_can_be_mended(cause: Cause) -> None:
    advice = ADVICE[cause]
    assert all((advice.why, advice.paceline, advice.torch))
    assert f"`{cause}`" in PAGE.read_text()


def test_what_changes_no_weights_is_alike() -> None:
    assert Cause.BATCH_GROWS in NOTES
    assert Cause.BATCH_GROWS not in ALIKE
