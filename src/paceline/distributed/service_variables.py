"""What services that start one process per node leave in the environment: pure functions."""

import json
from collections.abc import Callable, Mapping

from paceline.distributed.placement import USUAL_PORT, NodePlacement, Source
from paceline.distributed.variables import Environment, first_of, integer
from paceline.errors import UsageError
from paceline.options.quantities import parse_count


def from_kubeflow(environment: Environment) -> NodePlacement | None:
    """Read what Kubeflow's trainer sets (torchrun's own options): PET_NODE_RANK, PET_NNODES …"""
    if "PET_NODE_RANK" not in environment or "PET_NNODES" not in environment:
        return None
    nodes = parse_count(environment["PET_NNODES"])
    if nodes is None:
        raise UsageError(
            f"PET_NNODES is {environment['PET_NNODES']!r}: a training needs a fixed number of "
            "nodes, such as 2"
        )
    workers = environment.get("PET_NPROC_PER_NODE", "auto")
    return NodePlacement(
        node_rank=integer(environment, "PET_NODE_RANK", 0),
        nodes=nodes,
        workers=None if workers in ("auto", "gpu", "cpu") else _count(workers),
        source="kubeflow",
        master_addr=first_of(environment, "PET_MASTER_ADDR", "MASTER_ADDR"),
        master_port=integer(environment, "PET_MASTER_PORT", USUAL_PORT),
    )


def from_sagemaker(environment: Environment) -> NodePlacement | None:
    """Read what SageMaker sets: SM_HOSTS, SM_CURRENT_HOST, SM_NUM_GPUS.

    The same names stand for the container's resourceconfig.json, see `environment.surroundings`.
    """
    if "SM_HOSTS" not in environment or "SM_CURRENT_HOST" not in environment:
        return None
    hosts, own = _names(environment["SM_HOSTS"]), environment["SM_CURRENT_HOST"]
    if own not in hosts:
        raise UsageError(f"SM_CURRENT_HOST is {own!r}, which is none of SM_HOSTS: {hosts}")
    gpus = environment.get("SM_NUM_GPUS")
    return NodePlacement(
        node_rank=hosts.index(own),
        nodes=len(hosts),
        workers=None if gpus is None else max(1, _count(gpus)),
        source="sagemaker",
        master_addr=environment.get("MASTER_ADDR", hosts[0]),
        master_port=integer(environment, "MASTER_PORT", USUAL_PORT),
    )


def from_skypilot(environment: Environment) -> NodePlacement | None:
    """Read what SkyPilot sets: SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS, SKYPILOT_NUM_GPUS_PER_NODE.

    The first address is the head's.
    """
    addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
    if "SKYPILOT_NODE_RANK" not in environment or not addresses:
        return None
    gpus = environment.get("SKYPILOT_NUM_GPUS_PER_NODE")
    return NodePlacement(
        node_rank=integer(environment, "SKYPILOT_NODE_RANK", 0),
        nodes=integer(environment, "SKYPILOT_NUM_NODES", len(addresses)),
        workers=None if gpus is None else max(1, _count(gpus)),
        source="skypilot",
        master_addr=environment.get("MASTER_ADDR", addresses[0]),
        master_port=integer(environment, "MASTER_PORT", USUAL_PORT),
    )


NODES: Mapping[Source, Callable[[Environment], NodePlacement | None]] = {
    "kubeflow": from_kubeflow,
    "sagemaker": from_sagemaker,
    "skypilot": from_skypilot,
}
"""In the order in which they count; all of them after the launchers of workers."""


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"not a number of workers: {text!r}") from None


def _names(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise UsageError(f"SM_HOSTS should be a JSON list of names, not {text!r}")
    return sorted(names)
