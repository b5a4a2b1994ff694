"""A worker's place among all workers, and a node's place among all nodes."""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError

Source = Literal[
    "alone", "options", "torch", "openmpi", "mpich", "slurm", "kubeflow", "sagemaker", "skypilot"
]

USUAL_PORT = 29500
"""Where nothing names a port; torchrun's usual one."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A worker's place in the training."""

    rank: int = 0
    """0 … world_size-1 over all nodes."""
    world_size: int = 1
    local_rank: int = 0
    """0 … local_world_size-1 on this node; picks the GPU."""
    local_world_size: int = 1
    """Workers of this node; nodes may have different numbers of them."""
    node_rank: int = 0
    nodes: int = 1
    attempt: int = 0
    """Counts the restarts of the training, so that each gets keys of its own in the store."""
    source: Source = "alone"
    """Where this was read from."""
    settled: bool = True
    """Whether the figures of nodes are known; else they are counted when the group is joined."""
    master_addr: str = ""
    """Host of rank 0; empty where nobody named it."""
    master_port: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"{self._said_by()}RANK is {self.rank}, but WORLD_SIZE is {self.world_size}"
            )
        if not 0 <= self.local_rank < self.local_world_size:
            raise UsageError(
                f"{self._said_by()}LOCAL_RANK is {self.local_rank}, but LOCAL_WORLD_SIZE is "
                f"{self.local_world_size}"
            )

    def _said_by(self) -> str:
        return "" if self.source == "torch" else f"what {self.source} calls "

    @property
    def has_launcher(self) -> bool:
        """Whether something started this worker that forwards and repeats signals, and kills."""
        return self.source not in ("alone", "options")

    @property
    def on_one_node(self) -> bool:
        """Whether all workers are known to be on this node."""
        return self.settled and self.nodes == 1


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """A node's place in the training, where it isn't said which workers it has."""

    node_rank: int
    nodes: int
    workers: int | None
    """Workers of each node; None where that is left to the number of GPUs."""
    source: Source
    master_addr: str = ""
    master_port: int = USUAL_PORT

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.nodes:
            raise UsageError(
                f"{self.source} says that this is node {self.node_rank} of {self.nodes}; "
                "nodes count from 0"
            )

    def only_worker(self) -> Placement:
        """Give the place of this node's worker where each node has one."""
        return Placement(
            rank=self.node_rank,
            world_size=self.nodes,
            node_rank=self.node_rank,
            nodes=self.nodes,
            source=self.source,
            master_addr=self.master_addr,
            master_port=self.master_port,
        )
