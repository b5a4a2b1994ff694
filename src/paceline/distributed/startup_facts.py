"""Whether all workers were started for the same training: facts, compared before they connect.

Phases: all workers publish their facts, rank 0 compares them, all read the outcome.
"""

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, final

from torch._C._distributed_c10d import Store

from paceline.distributed.rendezvous import common_text, wait_until_read
from paceline.errors import InfrastructureError, JobError

Facts = Mapping[str, str]
"""What has to be the same on all workers: a name, as it stands in a message, and a value."""

_SHOWN = 5
_LONGEST = 120
_KEY = "accord"


@final
@dataclass(frozen=True)
class WorkerFacts:
    """A worker's host and facts."""

    host: str
    facts: Facts

    @classmethod
    def here(cls, facts: Facts) -> Self:
        """Make those of this process."""
        return cls(socket.gethostname(), facts)

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps([self.host, dict(self.facts)])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        host, facts = json.loads(text)
        return cls(str(host), {str(name): str(value) for name, value in facts.items()})


def disagreement(workers: Sequence[WorkerFacts]) -> str:
    """Say in what the workers differ from rank 0; empty where they don't. Pure.

    Args:
        workers: In rank order.
    """
    differences = list(_differences(workers))
    if not differences:
        return ""
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return (
        f"the workers differ: {'; '.join(differences[:_SHOWN])}{more}. All have to train the same: "
        "give each the same options, arguments, code, versions and data"
    )


def compare_by_store(
    store: Store, rank: int, world_size: int, facts: Facts, timeout_s: float
) -> None:
    """Compare facts through the store, before there is a process group. Every worker calls it.

    Three operations a worker, and for rank 0 one more that reads them all.

    Args:
        timeout_s: How long the store waits for a worker, for messages.

    Raises:
        JobError: The workers differ; each of them says so.
        InfrastructureError: A worker went away meanwhile.
    """
    try:
        store.set(f"{_KEY}/{rank}", WorkerFacts.here(facts).to_json())
        problem = _compare_on_rank_0(store, world_size) if rank == 0 else ""
        problem = common_text(store, rank, f"{_KEY}/disagreement", problem)
    except RuntimeError as error:
        raise InfrastructureError(
            f"rank {rank} on {socket.gethostname()} waited {timeout_s:g} s for the others to say "
            "what they train: a worker went away after all had met"
        ) from error
    # Rank 0 keeps the store: were it gone first, the others would see a lost connection only.
    if problem:
        if rank == 0:
            wait_until_read(store, f"{_KEY}/disagreement", world_size)
        raise JobError(problem)


def _compare_on_rank_0(store: Store, world_size: int) -> str:
    texts = store.multi_get([f"{_KEY}/{rank}" for rank in range(world_size)])
    return disagreement([WorkerFacts.from_json(text.decode()) for text in texts])


def _differences(workers: Sequence[WorkerFacts]) -> Iterator[str]:
    """Name each fact in which workers differ, with the first worker of each other value."""
    first = workers[0]
    names = dict.fromkeys(name for worker in workers for name in worker.facts)
    for name in names:
        own = first.facts.get(name, "none")
        ranks: dict[str, list[int]] = {}
        for rank, worker in enumerate(workers):
            ranks.setdefault(worker.facts.get(name, "none"), []).append(rank)
        del ranks[own]
        for value, having in ranks.items():
            who = f"rank {having[0]} on {workers[having[0]].host}"
            others = f" and {len(having) - 1} more have" if having[1:] else " has"
            yield f"{who}{others} {name} {_short(value)}, rank 0 on {first.host} has {_short(own)}"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
