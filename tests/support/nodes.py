"""Workers of one host, as if they were spread over several."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.distributed.group import Group


def on_nodes(group: Group, workers: Sequence[int]) -> Group:
    """The same workers, as if node n had `workers[n]` of them."""
    node, local_rank = 0, group.rank
    while local_rank >= workers[node]:
        local_rank -= workers[node]
        node += 1
    placement = replace(
        group.placement,
        local_rank=local_rank,
        local_world_size=workers[node],
        node_rank=node,
        nodes=len(workers),
    )
    return Group(placement, group.device, group.backend)
