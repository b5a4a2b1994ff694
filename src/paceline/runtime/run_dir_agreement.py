"""Workers that were started one by one agree on the run directory before anything is written."""

import json
from dataclasses import replace

from paceline.errors import InfrastructureError, UsageError
from paceline.results.run_directory import RunDirectory
from paceline.runtime.spec import Launch

_KEY = "run-directory"


def agree_on_run(launch: Launch) -> Launch:
    """Have rank 0 name and make the run directory, and every other worker take it over.

    Every worker calls it. Opens the store in which the workers will meet.

    Args:
        launch: This worker's; its run directory counts only on rank 0, or where the user named it.

    Raises:
        UsageError: Rank 0 can't make the directory; every worker says so.
        InfrastructureError: Rank 0 didn't come.
    """
    from paceline.distributed.environment import current_placement, surroundings
    from paceline.distributed.rendezvous import (
        common_text,
        of_attempt,
        open_store,
        wait_until_heard,
    )
    from paceline.distributed.rendezvous_address import meeting_address

    options = launch.config.dist
    # Meet: open the store at the address that every worker derives by itself.
    placement = current_placement(options)
    address = meeting_address(placement, options, surroundings())
    rank, timeout_s = placement.rank, options.timeout_s
    store = open_store(address, rank, placement.world_size, timeout_s, options.interface)
    # Rank 0 makes the directory before it publishes the name, so that its failure is known to all.
    problem = _make(launch) if rank == 0 else ""
    own = json.dumps({"path": str(launch.run.path), "problem": problem})
    own_store = of_attempt(store, placement.attempt)
    # Agree: rank 0 writes its text, the others wait for it.
    try:
        agreement = common_text(own_store, rank, _KEY, own)
    except RuntimeError as error:
        raise InfrastructureError(f"rank 0 did not come to {address} in {timeout_s:g} s") from error
    agreed = json.loads(agreement)
    if agreed["problem"]:
        # Rank 0 keeps the store: it stays until everybody has read why.
        if rank == 0:
            wait_until_heard(own_store, _KEY, placement.world_size)
        raise UsageError(agreed["problem"])
    # Take it over on this node.
    path = launch.run.path if launch.is_named else agreed["path"]
    run = replace(RunDirectory.named(path), shared=launch.run.shared)
    make_on_this_node(run)
    return replace(launch, run=run, request=replace(launch.request, run_dir=str(run.path)))


def make_on_this_node(run: RunDirectory) -> None:
    """Make the directory of a run that rank 0 has begun, where this node doesn't share rank 0's.

    Raises:
        UsageError: It can't be made here.
    """
    try:
        run.make_places()
    except OSError as error:
        raise UsageError(
            f"the run directory {run.path} of rank 0 can't be made on this node "
            f"({error.strerror}). Name one with --run-dir"
        ) from error


def _make(launch: Launch) -> str:
    """Make the run directory of a new training. Returns what stands in the way."""
    if not launch.makes:
        return ""
    try:
        launch.run.create()
    except UsageError as error:
        return str(error)
    return ""
