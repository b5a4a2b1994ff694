"""The store in which workers of all hosts meet: kept by the launcher, on loopback. Imports torch.

No host of the training keeps it, so that none is special; and nobody on the network reaches it,
since hosts come to it through their ssh connections.
"""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import final

_LOOPBACK = "127.0.0.1"


@final
class LauncherStore:
    """A store on a free port of loopback; torch is imported while hosts are being connected."""

    def __init__(self) -> None:
        # The port is known, and takes connections, before torch is imported to serve it.
        self._listener = socket.create_server((_LOOPBACK, 0), backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self._pool = ThreadPoolExecutor(1)
        self._opened = self._pool.submit(_open, self.port, self._listener.detach())

    def wait(self) -> None:
        """Wait until it serves."""
        self._opened.result()

    def close(self) -> None:
        """Close it."""
        self._opened.result()
        self._pool.shutdown()
        del self._opened


def quiet_sockets() -> None:
    """Have torch not warn of each address without a name; call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _open(port: int, descriptor: int) -> object:
    quiet_sockets()
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not declared there

    return TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
