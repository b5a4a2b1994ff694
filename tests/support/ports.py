"""Ports for tests."""

import socket


def free_port() -> int:
    """Give a port of loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
