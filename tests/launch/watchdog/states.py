"""States of workers for tests, with all that doesn't matter filled in."""

from dataclasses import fields, replace
from typing import Any

from paceline.launch.heartbeat import Reading
from paceline.launch.watchdog.stragglers import WorkerSpeed
from paceline.launch.watchdog.worker_state import WorkerState

IN_STEP = WorkerState(
    rank=0,
    host="node0",
    pid=100,
    process="running",
    busy=0.0,
    reading=Reading(
        step=40,
        operation="step",
        collectives=80,
        collective="gradients",
        steps=39,
        total_s=4.0,
    ),
    step_age_s=31.0,
    age_s=31.0,
    median_step_s=0.1,
)
"""It waits for gradients, longer than the usual limit."""
FAST = WorkerSpeed(
    rank=0,
    host="node0",
    step_s=0.1,
    compute_s=0.04,
    waiting_s=0.05,
    data_s=0.01,
)
"""It waits for others, half of the time."""


def changed(state: WorkerState, **values: Any) -> WorkerState:
    """Change some fields of a state, or of what the worker tells of itself."""
    told = {field.name: values.pop(field.name) for field in fields(Reading) if field.name in values}
    return replace(state, reading=replace(state.reading, **told), **values)
