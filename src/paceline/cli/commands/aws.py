"""`paceline aws up|status|hosts|down`: nodes of one's own on AWS, for `--hostfile`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ExitCode, UsageError
from paceline.options.command_line import note, read_options, show_help, take_word, wants_help
from paceline.options.fields import OptionField, OptionValue, option_fields, pick, unknown_name
from paceline.provision.aws.options import AskOptions, ClusterPlace, NetworkOptions, NodeOptions

if TYPE_CHECKING:
    from paceline.launch.aws_client import Aws
    from paceline.provision.aws.nodes import Instance
    from paceline.provision.aws.plan import ClusterPlan
    from paceline.provision.aws.stack import Stack

_COMMAND = "paceline aws"
_ABOUT = (
    "Make nodes on AWS and take them down again, as one CloudFormation stack: `up` makes them, "
    "`status` shows them and what they have cost, `hosts` prints a hostfile for `paceline train "
    "--hostfile`, `down` deletes them and looks whether anything is left."
)
_PLACE = option_fields(ClusterPlace, "Which nodes")
_UP = (
    *_PLACE,
    *option_fields(NodeOptions, "Nodes"),
    *option_fields(NetworkOptions, "Network"),
    *option_fields(AskOptions, "Asking and waiting"),
)
_WRITE = OptionField(
    name="write",
    annotation=str | None,
    default=None,
    help="Write the hostfile to this file, and host keys and ssh configuration to ~/.paceline/aws.",
    group="Hostfile",
)
_OPTIONS: Mapping[str, tuple[OptionField, ...]] = {
    "up": _UP,
    "status": _PLACE,
    "hosts": (*_PLACE, _WRITE),
    "down": _PLACE,
}
_EACH = {
    "up": "Make nodes that ssh reaches from here alone and that stop themselves after --max-hours.",
    "status": "Show the nodes, when they stop themselves and what they have cost.",
    "hosts": "Print a hostfile of the nodes that run.",
    "down": "Delete the nodes and all that belongs to them, and look whether anything is left.",
}
Given = Mapping[str, OptionValue]


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    usage = f"{_COMMAND} {'|'.join(_OPTIONS)}"
    if wants_help(tokens) and tokens[0] not in _OPTIONS:
        show_help(usage, _ABOUT, (), tokens)
    action, rest = take_word(tokens, usage, "what to do")
    if action not in _OPTIONS:
        raise UsageError(unknown_name(action, _OPTIONS, "action"))
    given = read_options(f"{_COMMAND} {action}", _EACH[action], rest, _OPTIONS[action]).values
    return _act(action, given)


def _act(action: str, given: Given) -> int:
    return _ACTIONS[action](pick(ClusterPlace, given), given)


def _up(place: ClusterPlace, given: Given) -> int:
    options, network = pick(NodeOptions, given), pick(NetworkOptions, given)
    ask = pick(AskOptions, given)
    aws = _connect(place)
    from paceline.provision.aws.formatting import plan_lines
    from paceline.provision.aws.lifecycle import make_nodes
    from paceline.provision.aws.plan import check_quotas, make_plan
    from paceline.provision.aws.stack import exists_already, find_stack

    # Look up and show all that would be made; nothing is made yet.
    if find_stack(aws, place.name) is not None:
        raise UsageError(exists_already(place.name, aws.region))
    plan = make_plan(aws, place.name, options, network)
    note("\n".join(plan_lines(plan)))
    if ask.dry_run:
        return _print_plan(plan)
    # From here on it costs money.
    check_quotas(plan)
    if not ask.yes and not _confirm():
        note("nothing was made")
        return ExitCode.DONE
    nodes = make_nodes(aws, plan, wait=ask.wait, say=note)
    _print_usage(place.name, nodes)
    return ExitCode.DONE


def _print_plan(plan: "ClusterPlan") -> int:
    content = {"template": json.loads(plan.template()), "parameters": plan.parameters()}
    print(json.dumps(content, indent=2))
    return ExitCode.DONE


def _confirm() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nodes cost money and nobody can be asked here: give --yes to make them")
    note("Make them? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_usage(name: str, nodes: Sequence["Instance"]) -> None:
    from paceline.provision.aws.files import kept

    files = kept(name)
    print("\n".join(f"{node.name} {node.address}" for node in nodes))
    note(
        f"train on them:  paceline train RECIPE --hostfile {files.hostfile} "
        f"--ssh-config {files.ssh_config}\n"
        f"log in:         ssh -F {files.ssh_config} {nodes[0].address}\n"
        f"delete them:    paceline aws down --name {name}"
    )


def _status(place: ClusterPlace, _: Given) -> int:
    aws = _connect(place)
    from paceline.provision.aws.formatting import status_lines
    from paceline.provision.aws.nodes import find_nodes
    from paceline.provision.aws.price import find_price
    from paceline.provision.aws.stack import find_stack

    stack, nodes = find_stack(aws, place.name), find_nodes(aws, place.name)
    if stack is not None:  # AWS goes on showing ended nodes, those of an earlier stack as well
        nodes = [node for node in nodes if node.stack == stack.id]
    if stack is None and all(node.gone for node in nodes):
        print(f"there are no nodes named {place.name} in {aws.region}")
        return ExitCode.DONE
    print(f"{place.name} in {aws.region}: stack {stack.status if stack else 'is gone'}")
    if not nodes:
        return ExitCode.DONE
    price = find_price(aws, nodes[0].instance_type, spot=nodes[0].spot, zone=nodes[0].zone)
    minutes = float(stack.outputs.get("StopAfterMinutes", "0")) if stack else 0.0
    print("\n".join(status_lines(nodes, price, minutes, datetime.now(UTC))))
    if stack and all(node.gone for node in nodes):
        print(f"the nodes are gone, the rest isn't: paceline aws down --name {place.name}")
    return ExitCode.DONE


def _hosts(place: ClusterPlace, given: Given) -> int:
    aws = _connect(place)
    from paceline.provision.aws.files import hostfile_text
    from paceline.provision.aws.nodes import find_nodes
    from paceline.provision.aws.stack import find_stack

    stack = find_stack(aws, place.name)
    nodes = [node for node in find_nodes(aws, place.name) if node.state == "running"]
    if stack is None or not nodes:
        raise UsageError(
            f"no node named {place.name} runs in {aws.region}: paceline aws status shows more"
        )
    text = hostfile_text(stack, nodes)
    print(text, end="")
    # With the keys and ssh configuration that the hostfile's hosts need.
    if given.get("write"):
        _write_files(aws, stack, nodes, Path(str(given["write"])).expanduser(), text)
    return ExitCode.DONE


def _write_files(
    aws: "Aws", stack: "Stack", nodes: Sequence["Instance"], hostfile: Path, text: str
) -> None:
    from paceline.files import write_atomic, writing
    from paceline.provision.aws.files import keep, kept
    from paceline.provision.aws.hostkeys import fetch_host_keys
    from paceline.provision.aws.waiter import Waiter, never

    # Host keys that are known count; only those of new nodes are read from their consoles.
    files = kept(stack.name)
    addresses = {node.address for node in nodes}
    keys = {address: each for address, each in files.known().items() if address in addresses}
    unknown = [node for node in nodes if node.address not in keys]
    keys |= fetch_host_keys(aws, unknown, Waiter(never), 0.0) if unknown else {}
    keep(files, stack, nodes, keys, None)
    with writing(hostfile):
        write_atomic(hostfile.absolute(), text.encode())
    note(f"wrote {hostfile}; use it with --ssh-config {files.ssh_config}")


def _down(place: ClusterPlace, _: Given) -> int:
    from paceline.provision.aws.lifecycle import delete_nodes

    delete_nodes(_connect(place), place.name, note)
    return ExitCode.DONE


def _connect(place: ClusterPlace) -> "Aws":
    from paceline.launch.aws_client import connect

    return connect(place.region)


_ACTIONS: Mapping[str, Callable[[ClusterPlace, Given], int]] = {
    "up": _up,
    "status": _status,
    "hosts": _hosts,
    "down": _down,
}
