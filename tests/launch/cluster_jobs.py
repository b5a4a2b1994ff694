"""Jobs to hand to clusters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.launch.cluster import ClusterJob

_JOB = ClusterJob(
    command=("train", "digits"),
    options=("--epochs", "2"),
    name="paceline-digits",
    nodes=2,
    workers=None,
    gpus_per_node=None,
    time_limit_s=None,
    image="example.org/team/train:1",
    max_restarts=3,
    directory=Path("/nowhere"),
    run_dir="runs/a",
    folder=Path("/nowhere/runs/a/cluster"),
)


def a_job(**changes: Any) -> ClusterJob:
    """Return a job of two nodes; changes are fields of it."""
    return replace(_JOB, **changes)
