"""Notes the counters at each step of an optimizer, beside those of the process."""

import os
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.pretend_gpu.counters import COUNTERS, counted_here


def note_steps() -> None:
    """Write a line a step into PRETEND_GPU_COUNTERS/PROCESS.steps, where that is set."""
    register_optimizer_step_post_hook(_note)


def _note(*_: object) -> None:
    directory = os.environ.get("PRETEND_GPU_COUNTERS")
    if not directory:
        return
    counted = counted_here()
    with Path(directory, f"{os.getpid()}.steps").open("a") as file:
        print(*(counted[name] for name in COUNTERS), file=file)
