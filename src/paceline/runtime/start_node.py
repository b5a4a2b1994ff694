"""Starts this node's workers where a service has started one process on each of several nodes."""

import json
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from paceline.distributed.placement import NodePlacement
from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.launch.errors.error_records import exit_code_of, forget_failures, read_failures
from paceline.launch.errors.failures import root_cause
from paceline.launch.local.worker import NodeRendezvous
from paceline.launch.restart_policy import Policy
from paceline.runtime.copying import owner
from paceline.runtime.outcome import announce_end, announce_failure
from paceline.runtime.run_dir_agreement import agree_on_run
from paceline.runtime.spec import PRELOAD, Launch
from paceline.runtime.tracking import tracked
from paceline.training.config import TrainConfig

_STOP_S = 60.0
"""Where a service stops the training there is nobody who waits, and snapshots may be large."""

if TYPE_CHECKING:
    from paceline.launch.local.launcher import LaunchOutcome


def start_on_node(launch: Launch, node: NodePlacement) -> int:
    """Run this node's share of a training to its end. Every node calls it. Returns the exit code.

    Raises:
        UsageError: The nodes can't meet as it was said.
        InfrastructureError: The nodes didn't meet, or workers could not be started.
    """
    from paceline.launch.local import forkserver
    from paceline.launch.local.launcher import launch_local

    # Meet the other nodes first: rank 0's node names the run directory.
    if node.source == "kubeflow":
        wait_for_host(node.master_addr, launch.config.dist.timeout_s)
    rendezvous = _rendezvous(launch.config, node)
    with ExitStack() as owned:
        launch = agree_on_run(launch, owner(owned))
        run, leads = launch.run, node.node_rank == 0
        if leads:
            run.remove_summary()
            forget_failures(run.logs)  # of an earlier start
            owned.enter_context(tracked(run, launch.config.metrics, quiet=launch.quiet))
        forkserver.prepare(PRELOAD, launch.place.threads)
        outcome = launch_local(
            launch.entry,
            launch.request.to_json(),
            workers=launch.place.workers,
            threads=launch.place.threads,
            # No restarts: the service starts again what failed.
            policy=Policy(stop=launch.config.stop_grace(least_s=_STOP_S)),
            log_dir=run.logs,
            progress=run.newest_step,
            rendezvous=rendezvous,
        )
        # The first node tells the end; every node tells of failures of its own workers.
        if leads and not outcome.failures:
            return announce_end(run, interrupted=_was_stopped(outcome), quiet=launch.quiet)
        if outcome.failures and not outcome.interrupted:
            # Each node reports its own failures, and the first one the cause among all of them,
            # whose records it sees where nodes share the run directory.
            every = {each.rank: each for each in (*read_failures(run.logs), *outcome.failures)}
            failures = root_cause(every.values())
            if leads:
                return announce_failure(run, failures)
            announce_failure(run, outcome.failures, None)
            return int(exit_code_of(failures[0].kind))
        return ExitCode.RESUMABLE if _was_stopped(outcome) else ExitCode.DONE


def wait_for_host(host: str, timeout_s: float) -> None:
    """Wait until a host's name has an address: a pod's name has one once the pod runs.

    Raises:
        InfrastructureError: It has none in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise InfrastructureError(
                    f"the host of rank 0, {host}, has no address after {timeout_s:g} s"
                ) from error
            time.sleep(1.0)
        else:
            return


def _rendezvous(config: TrainConfig, node: NodePlacement) -> NodeRendezvous:
    """Find where the nodes meet, and the interface that leads there."""
    from paceline.distributed.environment import chosen_interface, read_environment
    from paceline.distributed.interface import find_route, reachable_address
    from paceline.distributed.rendezvous_address import meeting_address

    environment = read_environment()
    address = meeting_address(node.only_worker(), config.dist, environment)
    if address.scheme == "file":
        raise UsageError(
            f"--init-method {address}: several nodes with several workers each meet at an address, "
            "not in a file. Write tcp://HOST:PORT"
        )
    chosen = chosen_interface(environment)
    route = find_route(address.host, config.dist.interface, chosen)
    return NodeRendezvous(
        node_rank=node.node_rank,
        nodes=node.nodes,
        host=reachable_address(address.host),
        port=address.port,
        ends_together=True,
        interface=route.interface,
    )


def _was_stopped(outcome: "LaunchOutcome") -> bool:
    """Tell whether a signal ended the training, on whichever node it came."""
    results = (json.loads(text) for text in outcome.results.values())
    return outcome.interrupted or any(r.get("stopped_because") == "signal" for r in results)
