"""Dry check of a worker's environment, reported line by line; starts and connects nothing."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.distributed.address import Address
from paceline.distributed.environment import (
    Findings,
    chosen_interface,
    detect_launchers,
    read_placement,
)
from paceline.distributed.interface import (
    address_on,
    find_route,
    is_loopback_name,
    loopback_route,
    own_addresses,
    reachable_address,
)
from paceline.distributed.launcher_variables import Environment
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import NodePlacement, Placement
from paceline.distributed.rendezvous_address import meeting_address
from paceline.errors import PacelineError

if TYPE_CHECKING:
    import torch

State = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class CheckLine:
    """One line of the report."""

    what: str
    """One word or two: `place`, `meeting`, `interface`, `device` …"""
    state: State
    text: str
    """What was found and, where it isn't ok, how to mend it."""


def examine(environment: Environment, options: DistOptions) -> tuple[CheckLine, ...]:
    """Find out what a worker started here would find.

    Args:
        options: As they would be given to `paceline train`.
    """
    findings: list[CheckLine] = []
    seen = Findings(workers=(), nodes=())
    placement = Placement()
    # Each question is asked even where an earlier one has failed: one run shows all faults.
    try:
        seen = detect_launchers(environment)
        placement = read_placement(environment, options)
    except PacelineError as error:
        findings.append(CheckLine("place", "fault", str(error)))
    else:
        findings.append(_place(placement))
    findings += _other_sources(placement, seen, environment)
    if placement.world_size > 1:
        met = _attempted("meeting", lambda: _meeting(environment, options, placement))
        way = _attempted("interface", lambda: _interface(environment, options, placement))
        # The same fault may show in both.
        known = {finding.text for finding in met}
        findings += [*met, *(finding for finding in way if finding.text not in known)]
    findings += _attempted("device", lambda: _device(options, placement))
    return tuple(findings)


def _attempted(what: str, look_at: Callable[[], Iterator[CheckLine]]) -> list[CheckLine]:
    """Collect findings; an error that a worker would meet is the last of them."""
    lines: list[CheckLine] = []
    try:
        lines.extend(look_at())
    except PacelineError as error:
        lines.append(CheckLine(what, "fault", str(error)))
    return lines


def _place(placement: Placement) -> CheckLine:
    if placement.source == "alone":
        text = "no launcher and no --rank: `paceline train` starts the workers of this machine"
        return CheckLine("place", "ok", text)
    text = (
        f"{placement.source}: rank {placement.rank} of {placement.world_size}, local rank "
        f"{placement.local_rank}"
    )
    if placement.settled:
        text += f" of {placement.local_world_size}, node {placement.node_rank} of {placement.nodes}"
    else:
        text += "; workers per node are counted when they meet"
    if placement.attempt:
        text += f", restart {placement.attempt}"
    return CheckLine("place", "ok", text)


def _other_sources(
    placement: Placement, seen: Findings, environment: Environment
) -> Iterator[CheckLine]:
    # Launchers that were found too, but come later in the order of precedence.
    for other in seen.workers:
        same = (other.rank, other.world_size) == (placement.rank, placement.world_size)
        if other.source != placement.source:
            yield CheckLine(
                "also found",
                "ok" if same else "warning",
                f"{other.source}: rank {other.rank} of {other.world_size}"
                + ("" if same else f"; {placement.source} counts before it"),
            )
    for node in seen.nodes:
        yield _node(node, placement)
    for problem in seen.problems:
        yield CheckLine("also found", "warning", f"{problem}; it doesn't count")
    incomplete = {"RANK", "WORLD_SIZE"} & environment.keys()
    if len(incomplete) == 1:
        (name,) = incomplete
        yield CheckLine(
            "variables",
            "warning",
            f"{name} is set alone and doesn't count: set RANK and WORLD_SIZE, or neither",
        )


def _node(node: NodePlacement, placement: Placement) -> CheckLine:
    text = f"{node.source}: node {node.node_rank} of {node.nodes}"
    if node.workers is not None:
        text += f", workers on each: {node.workers}"
    if placement.source == node.source and (node.workers or 1) > 1:
        text += (
            ". Paceline starts several workers on one node only: start it by torchrun with "
            f"--nproc-per-node {node.workers}"
        )
        return CheckLine("node", "fault", text)
    return CheckLine("node", "ok", text)


def _meeting(
    environment: Environment, options: DistOptions, placement: Placement
) -> Iterator[CheckLine]:
    address = meeting_address(placement, options, environment)
    if address.scheme == "file":
        yield _file(address)
        return
    # The name that was given, and the address it comes to on this host.
    where = reachable_address(address.host)
    shown = f"{address} ({where})" if where != address.host else str(address)
    if is_loopback_name(address.host):
        yield CheckLine(
            "meeting",
            "warning",
            f"{address.host} is a loopback address on this host (see /etc/hosts); {where} of "
            "the default route is taken. Better give rank 0's address instead of its name",
        )
    if address.scheme == "agent":
        yield CheckLine("meeting", "ok", f"{shown}, a store of torch's agent")
    elif placement.rank == 0:
        yield _listening(options, address, where)
    else:
        yield CheckLine("meeting", "ok", f"{shown}, where rank 0 will listen")


def _listening(options: DistOptions, address: Address, where: str) -> CheckLine:
    host = address_on(options.interface) if options.interface else where
    if host not in own_addresses() and not host.startswith("127."):
        text = (
            f"rank 0 is to listen at {address}, which is none of this host's addresses "
            f"({', '.join(sorted(own_addresses()))}). Name this host, or say --interface NAME"
        )
        return CheckLine("meeting", "fault", text)
    # Try it: open the port and close it again.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, address.port), family=family).close()
    except OSError as error:
        text = f"rank 0 can't listen at {address}: {error.strerror}. Choose another port"
        return CheckLine("meeting", "fault", text)
    return CheckLine("meeting", "ok", f"rank 0 will listen at {host}:{address.port}")


def _file(address: Address) -> CheckLine:
    path = Path(address.path)
    if path.exists():
        text = f"{path} is there already: remove it, or name a new file for each training"
        return CheckLine("meeting", "fault", text)
    if not path.parent.is_dir():
        text = f"there is no directory {path.parent} here: name one that all workers share"
        return CheckLine("meeting", "fault", text)
    return CheckLine("meeting", "ok", f"{path}, to be made by the first worker")


def _interface(
    environment: Environment, options: DistOptions, placement: Placement
) -> Iterator[CheckLine]:
    chosen = chosen_interface(environment)
    if placement.on_one_node and not options.interface and not chosen:
        route = loopback_route()
    else:
        address = meeting_address(placement, options, environment)
        route = find_route(address.host, options.interface, chosen)
    text = f"{route.interface}, {route.address}, by {route.chosen_by}"
    yield CheckLine("interface", "ok", text)


def _device(options: DistOptions, placement: Placement) -> Iterator[CheckLine]:
    from paceline.distributed.device import describe_device, pick_device, resolve_backend

    device = pick_device(options, placement)
    yield CheckLine("device", "ok", f"{device}: {describe_device(device)}")
    if placement.world_size == 1 and options.backend == "auto":
        return
    yield from _attempted("backend", lambda: _backend(resolve_backend(options, device), device))


def _backend(backend: str, device: "torch.device") -> Iterator[CheckLine]:
    from paceline.distributed.backends import load_backend

    load_backend(backend, device)
    yield CheckLine("backend", "ok", backend)
