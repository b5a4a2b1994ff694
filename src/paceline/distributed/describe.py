"""Describes workers, nodes and network for `run.json`."""

import json
import socket

from paceline.distributed.device import describe_device
from paceline.distributed.group import Group


def describe_placement(group: Group) -> dict[str, object]:
    """Describe how the workers found each other and where each of them is. Collective.

    Returns:
        The same on every worker: `source` (who said which worker is which), `init_method` (where
        they met; None for one worker), `backend`, `nodes`, and `workers`, one entry per rank with
        `rank`, `local_rank`, `node_rank`, `host`, `interface`, `address`, `chosen_by`, `device`.
    """
    placement, route = group.placement, group.route
    own = {
        "rank": group.rank,
        "local_rank": placement.local_rank,
        "node_rank": placement.node_rank,
        "host": socket.gethostname(),
        "interface": route.interface if route else None,
        "address": route.address if route else None,
        "chosen_by": route.chosen_by if route else None,
        "device": f"{group.device}: {describe_device(group.device)}",
    }
    return {
        "source": placement.source,
        "init_method": str(group.address) if group.address else None,
        "backend": group.backend,
        "nodes": placement.nodes,
        "workers": [json.loads(text) for text in group.gather_texts(json.dumps(own))],
    }
