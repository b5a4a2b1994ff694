"""What workers tell each other about twice a second, in one small exchange.

Everything that depends on a clock, on a signal or on figures from the device is decided here, from
the same numbers on every worker, so that all of them stop, save and show the same.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.dist.group import Group
from paceline.metrics.counters import Totals

_EVERY_S = 0.5
_MOST_STEPS = 1000
NOTHING = torch.empty(0, dtype=torch.float64)
"""Where news is all that there is to exchange."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """One worker's news since the last exchange."""

    signalled: bool
    """A signal asked this worker to stop."""
    bad_step: int | None
    """The first step whose loss isn't finite."""
    totals: Totals
    """This worker's sums of the epoch so far."""
    lap_s: float
    """Time since the last exchange."""
    data_s: float
    """The part of it spent waiting for data."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all workers know after an exchange; the same on each."""

    signalled: bool
    bad: tuple[int, int] | None
    """Step and rank of the earliest loss that isn't finite."""
    totals: Totals
    """Sums of the epoch so far over all workers."""
    lap_s: float
    """Time since the last exchange by rank 0's clock: no two clocks are ever compared."""
    data_s: float
    """Longest wait for data among the workers."""
    counted: Tensor = field(compare=False)
    """(world_size, 4) float64, in rank order: each worker's sums, see `Totals.as_row`."""
    more: Tensor = field(compare=False)
    """(world_size, K) float64, in rank order: what each worker gave besides."""


def agree(status: Status, group: Group, more: Tensor = NOTHING) -> Agreement:
    """Exchange news. Collective, blocks until every worker is there.

    Args:
        status: This worker's news.
        group: The workers.
        more: (K,) float64 on the CPU, passed on to all; the same K on every worker.
    """
    bad_step = math.inf if status.bad_step is None else float(status.bad_step)
    times = torch.tensor(
        [status.signalled, bad_step, status.lap_s, status.data_s], dtype=torch.float64
    )
    # (world_size, 8 + K)
    rows = group.gather_rows(torch.cat([times, status.totals.as_row(), more]))
    bad_step, bad_rank = min((float(step), rank) for rank, step in enumerate(rows[:, 1]))
    return Agreement(
        signalled=bool(rows[:, 0].any()),
        bad=None if math.isinf(bad_step) else (int(bad_step), bad_rank),
        totals=Totals.from_row(rows[:, 4:8].sum(0)),
        lap_s=float(rows[0, 2]),
        data_s=float(rows[:, 3].max()),
        counted=rows[:, 4:8],
        more=rows[:, 8:].contiguous(),
    )


def steps_to_next(lap_s: float, steps: int) -> int:
    """Choose after how many steps to exchange again, so that it happens about twice a second."""
    if steps == 0 or lap_s <= 0:
        return 1
    return max(1, min(_MOST_STEPS, int(_EVERY_S * steps / lap_s)))
