"""Has one process make the run directory before anything is written, and all others use it."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.results.run_directory import RunDirectory
from paceline.runtime.spec import Launch

_KEY = "run-directory"
_WAIT_S = 60.0
Found = TypeVar("Found")


def make_run(launch: Launch) -> Launch:
    """Make the run directory of a new training, under a name that no other has.

    One process of a training calls it, and this is the one place that decides the name. It goes on
    in the directory that there is where the workers have been started before.

    Raises:
        UsageError: It can't be made, or holds something else.
    """
    place = launch.place
    if launch.is_new and not launch.is_named:
        launch = with_run(launch, launch.run.claim(place.starter(), again=place.attempt > 0))
    if launch.makes:
        launch.run.create()
    return launch


def find_run(launch: Launch) -> Launch | None:
    """Find the run directory that the node's first worker makes; None where another is in the way.

    Raises:
        InfrastructureError: It was not made.
    """
    if not launch.is_new:
        return launch
    if launch.is_named:
        has_begun = (
            launch.makes and launch.run.run_json.exists()
        )  # written once all workers have met
        return None if has_begun else launch
    starter = launch.place.starter()
    return with_run(launch, wait_for(launch.run.path, lambda: launch.run.claimed_by(starter)))


def wait_for(path: Path, find: Callable[[], Found | None]) -> Found:
    """Wait for what the node's first worker makes.

    Args:
        path: Where it is to be, for the message.
        find: Gives it, once it is there.

    Raises:
        InfrastructureError: It was not made.
    """
    deadline_s = time.monotonic() + _WAIT_S
    while (found := find()) is None:
        if time.monotonic() > deadline_s:
            raise InfrastructureError(f"{path} was not made by the first worker of this node")
        time.sleep(0.05)
    return found


def with_run(launch: Launch, run: RunDirectory) -> Launch:
    """Give a launch the run directory that was agreed on."""
    launch.settled(run)
    return replace(launch, run=run, request=replace(launch.request, run_dir=str(run.path)))


def agree_on_run(launch: Launch, own: Callable[[Launch], None]) -> Launch:
    """Have rank 0 name, make and own the run directory, and every other worker take it over.

    Every worker calls it. Opens the store in which the workers will meet.

    Args:
        launch: This worker's; its run directory counts only on rank 0, or where the user named it.
        own: Rank 0 calls it with the directory that it has made: locks it, begins to copy it.

    Raises:
        UsageError: Rank 0 can't make or own the directory; every worker says so.
        InfrastructureError: Rank 0 didn't come; or the place for copies doesn't answer it, which
            every worker says, too.
    """
    from paceline.distributed.environment import current_placement, read_environment
    from paceline.distributed.rendezvous import (
        common_text,
        of_attempt,
        open_store,
        wait_until_read,
    )
    from paceline.distributed.rendezvous_address import meeting_address

    options = launch.config.dist
    # Meet: open the store at the address that every worker derives by itself.
    placement = current_placement(options)
    address = meeting_address(placement, options, read_environment())
    rank, timeout_s = placement.rank, options.timeout_s
    store = open_store(address, rank, placement.world_size, timeout_s, options.interface)
    # Rank 0 makes the directory before it publishes the name, so that its failure is known to all.
    launch, problem = _make(launch, own) if rank == 0 else (launch, None)
    message: dict[str, object] = {"path": str(launch.run.path)}
    if problem is not None:
        message |= {"problem": str(problem), "exit_code": problem.exit_code}
    own_store = of_attempt(store, placement.attempt)
    # Agree: rank 0 writes its text, the others wait for it.
    try:
        agreement = common_text(own_store, rank, _KEY, json.dumps(message))
    except RuntimeError as error:
        raise InfrastructureError(f"rank 0 did not come to {address} in {timeout_s:g} s") from error
    agreed = json.loads(agreement)
    if "problem" in agreed:
        # Rank 0 keeps the store: it stays until everybody has read why.
        if rank == 0:
            wait_until_read(own_store, _KEY, placement.world_size)
        is_usage = agreed["exit_code"] == ExitCode.USAGE
        raise (UsageError if is_usage else InfrastructureError)(agreed["problem"])
    # Take it over on this node.
    path = launch.run.path if launch.is_named else agreed["path"]
    run = replace(RunDirectory.named(path), shared=launch.run.shared)
    make_on_this_node(run)
    return with_run(launch, run)


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


def _make(
    launch: Launch, own: Callable[[Launch], None]
) -> tuple[Launch, UsageError | InfrastructureError | None]:
    """Make the run directory of a new training. Returns also what stands in the way."""
    try:
        made = make_run(launch)
        own(made)
    except (UsageError, InfrastructureError) as error:
        return launch, error
    return made, None
