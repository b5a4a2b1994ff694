"""Ranks that wait for one another in vain: verify ends by a limit, and says where they are."""

from pathlib import Path

import pytest

from tests.verify.conftest import Verify
from tests.verify.faults.scripts import PLAIN

pytestmark = pytest.mark.xdist_group("verify")

EVALUATION = "    accuracy = evaluate(model)\n"
STEPS = "    for inputs, targets in train:\n"


@pytest.mark.ranks
@pytest.mark.xdist_group("verify")
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "for epoch in range(5):",
            "if rank == 0:\n    dist.barrier()\nfor epoch in range(5):",
            "rank 0: in barrier() after 0 steps; rank 1: in",
        ),
        (
            STEPS,
            "    for number, (inputs, targets) in enumerate(train):\n"
            "        if rank == 1 and number == 2:\n            raise SystemExit\n",
            "rank 1: at the script's end after 2 steps",
        ),
        (
            EVALUATION,
            "    if rank == 0:\n        dist.barrier()\n    else:\n"
            "        import signal\n        signal.pause()\n" + EVALUATION,
            "(rank 0: in barrier() after 3 steps; rank 1: in no such call after 3 steps)",
        ),
    ],
    ids=["barrier of rank 0", "unequal steps", "nobody comes"],
)
@pytest.mark.slow
def test_ranks_in_different_places(
    before: str, after: str, told: str, verify: Verify, tmp_path: Path
) -> None:
    script = PLAIN.replace(before, after)
    assert script != PLAIN
    (tmp_path / "train.py").write_text(script)
    done = verify("train.py", "--tolerance", "1e-4", "--timeout-s", "2")
    assert done.code == 65, done.out + done.err
    assert "waits-apart" in done.causes, done.out + done.err
    assert told in done.words
    assert "Fatal Python error" not in done.err
