"""Who am I among the workers: the one place where a worker reads the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError

Source = Literal["alone", "torch"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A worker's place in the training."""

    rank: int = 0
    """0 … world_size-1 over all nodes."""
    world_size: int = 1
    local_rank: int = 0
    """0 … local_world_size-1 on this node; picks the GPU."""
    local_world_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    attempt: int = 0
    """Counts the restarts of the training, so that each gets keys of its own in the store."""
    source: Source = "alone"
    """Where this was read from."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"RANK is {self.rank}, but WORLD_SIZE is {self.world_size}")
        if not 0 <= self.local_rank < self.local_world_size:
            raise UsageError(
                f"LOCAL_RANK is {self.local_rank}, but LOCAL_WORLD_SIZE is {self.local_world_size}"
            )


def current_placement() -> Placement:
    """Read this process's place; see `read_placement`."""
    return read_placement(os.environ)


def started_by_launcher(environment: Mapping[str, str]) -> bool:
    """Tell whether torchrun (or another elastic agent) has started this process as a worker."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def read_placement(environment: Mapping[str, str]) -> Placement:
    """Read this worker's place from the environment that torch's elastic agent sets.

    Args:
        environment: Normally `os.environ`.

    Raises:
        UsageError: A variable isn't a whole number, or they contradict each other.
    """
    if not started_by_launcher(environment):
        return Placement()
    world_size = _integer(environment, "WORLD_SIZE", 1)
    local_world_size = _integer(environment, "LOCAL_WORLD_SIZE", 1)
    restarts = _integer(environment, "TORCHELASTIC_RESTART_COUNT", 0)
    return Placement(
        rank=_integer(environment, "RANK", 0),
        world_size=world_size,
        local_rank=_integer(environment, "LOCAL_RANK", 0),
        local_world_size=local_world_size,
        node_rank=_integer(environment, "GROUP_RANK", 0),
        nodes=_integer(
            environment, "GROUP_WORLD_SIZE", max(1, world_size // max(1, local_world_size))
        ),
        attempt=_integer(environment, "PACELINE_ATTEMPT", restarts),
        source="torch",
    )


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the variable {name} should be a whole number, not {text!r}") from None
