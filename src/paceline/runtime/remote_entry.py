"""Runs on each host before a training over hosts: reports its facts and number of workers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.distributed.environment import chosen_interface, read_environment
from paceline.distributed.interface import (
    Route,
    find_route,
    interface_with,
    is_loopback,
    own_addresses,
    resolve,
)
from paceline.errors import UsageError
from paceline.results.run_directory import RunDirectory
from paceline.runtime.placement import local_place
from paceline.training.config import TrainConfig, TrainRequest
from paceline.training.recipe import absolute_reference
from paceline.training.run_record.startup_facts import code_and_versions


def inspect(text: str) -> str:
    """Report this host's facts. Called by name in every attempt's process.

    Args:
        text: The launcher's order as JSON: `payload`, `run_dir`, `paths`, `workers`, `address`,
            `ssh_address`.

    Returns:
        JSON: `payload` with this host's paths, `workers` and `threads` of each, `interface` and
        `address` at which the others reach it, and `facts` that must be the same on all hosts.

    Raises:
        UsageError: The training can't run here as it was asked for.
    """
    order = json.loads(text)
    request = _at_home(TrainRequest.from_json(order["payload"]), order)
    config = TrainConfig.from_settings(request.settings)
    place = local_place(config, requested=order["workers"])
    route = _route(order, config)
    return json.dumps(
        {
            "payload": request.to_json(),
            "workers": place.workers,
            "threads": place.threads,
            "interface": route.interface,
            "address": route.address,
            "facts": code_and_versions(request),
        }
    )


def _at_home(request: TrainRequest, order: Mapping[str, object]) -> TrainRequest:
    """Make the paths absolute, from this host's working directory."""
    names = order["paths"]
    paths = set(names) if isinstance(names, list) else set()
    return replace(
        request,
        reference=_reference(request),
        run_dir=str(RunDirectory.named(str(order["run_dir"])).path),
        arguments={
            name: str(Path(str(value)).expanduser().absolute()) if name in paths else value
            for name, value in request.arguments.items()
        },
    )


def _reference(request: TrainRequest) -> str:
    if request.kind == "script":
        return str(Path(request.reference).expanduser().absolute())
    return absolute_reference(request.reference)


def _route(order: Mapping[str, object], config: TrainConfig) -> Route:
    """Choose the address at which the other hosts reach this one, and its interface.

    What the user says counts, then where ssh came in, then the default route.
    """
    wanted, by_ssh = order["address"], str(order["ssh_address"])
    chosen = chosen_interface(read_environment())
    if wanted:
        address = resolve(str(wanted))
        if address not in own_addresses():
            raise UsageError(
                f"{wanted} is none of this host's addresses ({', '.join(sorted(own_addresses()))})"
            )
        return Route(interface=interface_with(address), address=address, chosen_by="--interface")
    if config.dist.interface or chosen or not by_ssh or is_loopback(by_ssh):
        return find_route("", config.dist.interface, chosen)
    return Route(interface=interface_with(by_ssh), address=by_ssh, chosen_by="route to rank 0")
