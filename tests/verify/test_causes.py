"""Every cause has advice, and the page on `paceline verify` has an example of it."""

from pathlib import Path

import pytest

from paceline.verify import causes, resume_causes
from paceline.verify.causes import Cause

CAUSES = [
    c for module in (causes, resume_causes) for c in vars(module).values() if isinstance(c, Cause)
]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verify.md"


@pytest.mark.parametrize("cause", CAUSES, ids=str)
def test_every_cause_can_be_mended(cause: Cause) -> None:
    assert all((cause.why, cause.paceline, cause.torch))
    assert f"`{cause}`" in PAGE.read_text()
