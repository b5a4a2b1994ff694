"""Copies between host and device are few, bring the right values, and hold nobody up."""

from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu


def test_what_copies_cost(gpus: Host, tmp_path: Path) -> None:
    done = gpus.python("-m", "tests.pretend_gpu.copies", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "fetch syncs 1 d2h 1 h2d 0 pageable 0",
        "send syncs 0 d2h 0 h2d 1 pageable 0",
        "copy syncs 0 d2h 0 h2d 0 pageable 0",
        "snapshot syncs 0 d2h 1 h2d 0 pageable 0",
        "batch syncs 0 d2h 0 h2d 2 pageable 0",
        "statistics syncs 0 d2h 0 h2d 0 pageable 0",
        "epoch syncs 0 d2h 0 h2d 5 pageable 0",
    ]
