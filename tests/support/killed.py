"""One of three workers is killed at some instant while they sum gradients in a node's memory."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torch import nn

from paceline.distributed.group import Group
from paceline.errors import InfrastructureError
from paceline.gradient_sync.ordered.reduce import OrderedSum
from tests.launch.waiting import until
from tests.support.ranks import RankError, mapped_files, run_ranks
from tests.support.shards import fresh_net, run_step

_WORKERS = 3
_MOST_S = 0.1


def kill_at_random(seed: int, place: Path) -> list[float]:
    """Kill one at an instant that the seed settles; the others must miss it.

    Args:
        seed: Of the worker and the instant.
        place: An empty directory.

    Returns:
        Seconds from the kill to the error of each of the others.
    """
    chance = random.Random(seed)
    victim, after_s = chance.randrange(_WORKERS), chance.uniform(0.001, _MOST_S)
    killed, missed = place / "killed", place / "missed"
    missed.mkdir()

    def body(group: Group) -> None:
        if group.rank == victim and os.fork() == 0:
            # It holds the pipe by which the caller would learn of the end, and end the others.
            with suppress(TimeoutError):
                until(lambda: len(list(missed.iterdir())) == _WORKERS - 1)
            os._exit(0)
        before = mapped_files()
        model = fresh_net()
        ordered = OrderedSum(group, 8)
        run_step(ordered, model)
        assert mapped_files() <= before  # so that nothing can be left
        group.barrier()
        if group.rank == victim:
            killed.write_text(repr(time.monotonic() + after_s))
            # Without a handler this ends the process wherever it is, as SIGKILL does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, after_s)
        with pytest.raises(InfrastructureError, match=r"rank \d has ended: connection closed"):
            _train_on(ordered, model)
        (missed / str(group.rank)).write_text(repr(time.monotonic()))
        time.sleep(60)  # until the caller has learned of the end

    with pytest.raises(RankError):
        run_ranks(_WORKERS, body)
    others = {int(path.name): float(path.read_text()) for path in missed.iterdir()}
    assert set(others) == set(range(_WORKERS)) - {victim}
    return [missed_s - float(killed.read_text()) for missed_s in others.values()]


def _train_on(ordered: OrderedSum, model: nn.Module) -> None:
    while True:
        run_step(ordered, model)
