"""Collectives that don't belong together: recognised by their errors' text, and told to the user.

Gloo's own thread raises such an error, which nobody can catch: it aborts the process.
"""

import re
from collections.abc import Sequence

from paceline.launch.errors.python_stacks import own_frame
from paceline.launch.heartbeat import EVALUATING

DIFFERENT_COLLECTIVES = "the workers were in different collectives"
REMEDY = (
    "Each of these is done by all workers together. Make the same calls on every worker, in the "
    "same order: s.evaluate(...), s.sum(...), s.snapshot() and the like neither under "
    "`if s.is_main:` nor where each worker decides by figures of its own, and for each batch one "
    "s.step(loss); instead of leaving a batch out, give its loss no weight, s.step(0 * loss)"
)
_MISMATCH = re.compile(
    r"received data size doesn't match expected size|distributed collective mismatch"
    r"|op\.preamble\.(?:length|opcode)|mismatch between collectives",
    re.IGNORECASE,
)
"""What Gloo says (`transport/tcp/pair.cc`), and torch with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
_CALLS = {
    EVALUATING: "s.evaluate(...)",
    "step": "a step",
    "agree": "the exchange of what the workers have done",
    "snapshot": "a snapshot",
    "epoch end": "the exchange at the end of the epoch",
    "script": "a call of the script",
}
"""By the operations of `heartbeat.note`; others stand for themselves."""


def is_mismatch(text: str) -> bool:
    """Whether an error says that workers have met in different collectives. Pure."""
    return _MISMATCH.search(text) is not None


def describe_place(rank: int, host: str, step: int | None, operation: str, stack: str) -> str:
    """Say in a line which collective a worker was in.

    Args:
        step: The step it was in, where it got that far.
        operation: As its note has it; empty where unknown.
        stack: Its traceback, or its threads' stacks; empty where unknown.
    """
    where = f" was in {_CALLS.get(operation, operation)}" if operation else ""
    details = [f"operation {operation}"] if operation in _CALLS else []
    details += [] if step is None else [f"step {step}"]
    listed = f" ({', '.join(details)})" if details else ""
    frame = own_frame(stack, of_user=True)
    return f"rank {rank} on {host}{where}{listed}{f', at {frame}' if frame else ''}"


def explain(places: Sequence[str]) -> str:
    """Say that workers have met in different collectives, and what helps.

    Args:
        places: Of each worker that is known, as of `describe_place`.
    """
    listed = "\n".join(f"  {place}" for place in places)
    return f"{DIFFERENT_COLLECTIVES.capitalize()}:\n{listed}\n{REMEDY}"
