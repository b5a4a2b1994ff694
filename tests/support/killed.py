"""A worker is killed at some instant while all sum gradients in the memory of their nodes."""

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from paceline.distributed.group import Group
from paceline.errors import InfrastructureError
from paceline.gradient_sync.ordered.reduce import OrderedSum
from paceline.launch.errors.failures import is_lost_peer
from tests.launch.waiting import until
from tests.support.nodes import on_nodes
from tests.support.ranks import RankError, mapped_files, run_ranks
from tests.support.shards import fresh_net, run_step

_MOST_S = 0.1


def kill_at_random(seed: int, place: Path, sizes: Sequence[int] = (3,)) -> list[float]:
    """Kill one at an instant that the seed settles; the others must miss it.

    Args:
        seed: Of the worker and the instant.
        place: An empty directory.
        sizes: Of the nodes, in workers.

    Returns:
        Seconds from the kill to the error of each of the others.
    """
    chance = random.Random(seed)
    workers = sum(sizes)
    victim, after_s = chance.randrange(workers), chance.uniform(0.001, _MOST_S)
    killed, missed = place / "killed", place / "missed"
    missed.mkdir()

    def body(group: Group) -> None:
        if os.fork() == 0:
            # It holds the pipe by which the caller would learn of an end, and end the others.
            with suppress(TimeoutError):
                until(lambda: len(list(missed.iterdir())) == workers - 1)
            os._exit(0)
        before = mapped_files()
        model = fresh_net()
        ordered = OrderedSum(on_nodes(group, sizes), 8, bucket_bytes=2000)
        run_step(ordered, model)
        assert mapped_files() <= before  # so that nothing can be left
        group.barrier()
        if group.rank == victim:
            killed.write_text(repr(time.monotonic() + after_s))
            # Without a handler this ends the process wherever it is, as SIGKILL does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, after_s)
        said = r"rank \d (has ended|on another node): .*connection (closed|reset)"
        with pytest.raises(InfrastructureError, match=rf"(?i){said}") as found:
            _train_on(ordered, model)
        assert is_lost_peer(type(found.value).__name__, str(found.value))
        (missed / str(group.rank)).write_text(repr(time.monotonic()))
        ordered.release()  # as after any error
        dist.destroy_process_group()
        os._exit(1)

    with pytest.raises(RankError):
        run_ranks(workers, body)
    others = {int(path.name): float(path.read_text()) for path in missed.iterdir()}
    assert set(others) == set(range(workers)) - {victim}
    return [missed_s - float(killed.read_text()) for missed_s in others.values()]


def _train_on(ordered: OrderedSum, model: nn.Module) -> None:
    while True:
        run_step(ordered, model)
