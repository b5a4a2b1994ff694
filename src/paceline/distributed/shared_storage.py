"""Detects whether a directory is on a file system that all nodes share."""

import secrets
from pathlib import Path

import torch

from paceline.distributed.group import Group
from paceline.errors import InfrastructureError

_TOKEN_BYTES = 16


def shared_between_nodes(directory: Path, group: Group) -> bool:
    """Find out whether every node sees the directory of rank 0's node. Collective.

    Rank 0 leaves a file with a random name there; the first worker of each node looks for it.
    With one node the answer is True without looking.

    Args:
        directory: Exists on every node; the same name may mean different places.

    Returns:
        The same on every worker: False where at least one node has a directory of its own.

    Raises:
        InfrastructureError: Rank 0 can't write there; every worker says so.
    """
    if group.placement.nodes == 1:
        return True
    token = directory / f".shared-{group.broadcast_text(secrets.token_hex(_TOKEN_BYTES))}"
    problem = _leave(token) if group.rank == 0 else ""
    try:
        problem = group.broadcast_text(problem)  # also: the file is there before anyone looks
        if problem:
            raise InfrastructureError(f"{directory} can't be written on rank 0's node: {problem}")
        # One worker of each node looks.
        sees = group.placement.local_rank > 0 or _is_there(token)
        return bool(group.gather_rows(torch.tensor([sees], dtype=torch.uint8)).all())
    finally:
        if group.rank == 0:
            token.unlink(missing_ok=True)


def _leave(token: Path) -> str:
    """Write the file. Returns what went wrong, or an empty text."""
    try:
        token.touch(mode=0o600)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_there(token: Path) -> bool:
    """Check for the token; listing the directory makes a network file system ask its server."""
    return token.name in {path.name for path in token.parent.iterdir()}
