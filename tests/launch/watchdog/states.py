"""States of workers for tests, with all that doesn't matter filled in."""

from paceline.launch.watchdog.worker_state import WorkerState

IN_STEP = WorkerState(
    rank=0,
    host="node0",
    pid=100,
    process="running",
    busy=0.0,
    step=40,
    operation="step",
    collectives=80,
    collective="gradients",
    step_age_s=31.0,
    age_s=31.0,
    median_step_s=0.1,
    steps=39,
    total_s=4.0,
)
"""It waits for gradients, longer than the usual limit."""
