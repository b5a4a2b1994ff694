"""The environment that torch's elastic agent gives to its workers, without the agent."""

import os
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from paceline.distributed.group import Group


class AgentStore:
    """A store on a free port of loopback; workers connect to it and don't start their own."""

    def __init__(self) -> None:
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )

    def become_worker(self, group: Group, attempt: int = 0) -> None:
        """Turn a forked rank of a test into a worker that hasn't joined its group yet."""
        if dist.is_initialized():
            dist.destroy_process_group()
        own = {
            "RANK": group.rank,
            "WORLD_SIZE": group.world_size,
            "LOCAL_RANK": group.rank,
            "LOCAL_WORLD_SIZE": group.world_size,
            "PACELINE_ATTEMPT": attempt,
            "MASTER_PORT": self._store.port,
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        os.environ |= {name: str(value) for name, value in own.items()}
