"""`paceline aws up|status|hosts|down`: your own nodes on AWS, for `--hostfile`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from paceline.errors import ExitCode, UsageError
from paceline.launch.signals import signals_raised
from paceline.options.command_line import note, read_options, show_help, take_word, wants_help
from paceline.options.fields import OptionField, OptionValue, option_fields, pick, unknown_name
from paceline.provision.aws import ssh, stack
from paceline.provision.aws.options import (
    ClusterOptions,
    ConfirmOptions,
    NetworkOptions,
    NodeOptions,
    read_network,
)
from paceline.provision.aws.template import Plan

_COMMAND = "paceline aws"
_ABOUT = (
    "Create nodes on AWS and delete them again, as one CloudFormation stack: `up` creates them, "
    "`status` shows them, `hosts` prints a hostfile for `paceline train --hostfile`, `down` "
    "deletes them and checks whether anything is left."
)
_CLUSTER = option_fields(ClusterOptions, "Which nodes")
_OPTIONS: Mapping[str, tuple[OptionField, ...]] = {
    "up": (
        *_CLUSTER,
        *option_fields(NodeOptions, "Nodes"),
        *option_fields(NetworkOptions, "Network"),
        *option_fields(ConfirmOptions, "Confirmation"),
    ),
    "status": _CLUSTER,
    "hosts": _CLUSTER,
    "down": _CLUSTER,
}
_EACH = {
    "up": "Create nodes that only you reach by ssh and that stop themselves after --max-hours.",
    "status": "Show the nodes, and when they stop themselves.",
    "hosts": "Print a hostfile of the nodes that run.",
    "down": "Delete the nodes and all that belongs to them, and check whether anything is left.",
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
    cluster = pick(ClusterOptions, given)
    if action == "up":
        parts = pick(NodeOptions, given), pick(NetworkOptions, given), pick(ConfirmOptions, given)
        return _up(stack.connect(cluster.region), cluster.name, *parts)
    return _OTHERS[action](stack.connect(cluster.region), cluster.name)


def _up(
    aws: stack.Aws,
    name: str,
    options: NodeOptions,
    network: NetworkOptions,
    confirm: ConfirmOptions,
) -> int:
    if stack.find_stack(aws, name) is not None:
        raise UsageError(
            f"there is a stack {name} in {aws.region} already: paceline aws status --name {name} "
            f"shows it, down --name {name} deletes it, or give another --name"
        )
    key = ssh.find_key(network.public_key)
    allowed = network.allow_ssh_from
    plan = stack.make_plan(
        aws,
        name,
        options,
        network,
        public_key=key.read_text("utf-8").strip(),
        ssh_from=ssh.callers_network() if allowed is None else read_network(allowed),
    )
    if confirm.dry_run:
        content = {"template": json.loads(plan.template()), "parameters": plan.parameters()}
        print(json.dumps(content, indent=2))
        return ExitCode.DONE
    note(_describe(plan))
    if not confirm.yes and not _confirmed():
        note("nothing was created")
        return ExitCode.DONE

    def use(created: stack.Stack, nodes: Sequence[stack.Node]) -> None:
        note("waiting for the nodes' host keys on their consoles")
        keys = ssh.fetch_host_keys(aws, nodes)
        if len(keys) < len(nodes):
            note("no host key was seen of some nodes: ssh will ask, or use --host-keys accept-new")
        ssh.write_files(created, name, nodes, keys, key)
        print("\n".join(f"{node.name} {node.address}" for node in nodes))

    stack.create_nodes(aws, plan, note, use)
    directory = ssh.directory_of(name)
    note(
        f"train on them:  paceline train RECIPE --hostfile {directory}/hosts "
        f"--ssh-config {directory}/ssh_config\n"
        f"log in:         ssh -F {directory}/ssh_config ADDRESS\n"
        f"delete them:    paceline aws down --name {name}"
    )
    return ExitCode.DONE


def _describe(plan: Plan) -> str:
    options, adapters = plan.options, len(plan.fabric_cards)
    return "\n".join(
        [
            f"{plan.name}: {options.nodes} x {options.instance_type} "
            f"({'spot' if options.spot else 'on demand'}, {options.disk_gb} GB each) in "
            f"{plan.site.subnet or plan.site.zone}",
            *([f"  fabric   {adapters} adapters each"] if adapters else []),
            f"  access   ssh from {plan.ssh_from}; TCP ports 20000-29999 between the nodes",
            f"  rights   {'S3 ' + options.bucket if options.bucket else 'none in your account'}",
            f"  life     {options.max_hours:g} h from each node's start, then it is gone"
            + ("; its elastic address costs on until `down`" if plan.elastic_addresses else ""),
        ]
    )


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nodes cost money, and there is no terminal to confirm: add --yes")
    note("Create them? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _status(aws: stack.Aws, name: str) -> int:
    found, nodes = stack.find_stack(aws, name), stack.find_nodes(aws, name)
    nodes = [node for node in nodes if node.state != "terminated"]
    if found is None and not nodes:
        print(f"there are no nodes named {name} in {aws.region}")
        return ExitCode.DONE
    print(f"{name} in {aws.region}: stack {found.status if found else 'is gone'}")
    minutes = float(found.outputs.get("StopAfterMinutes", 0)) if found else 0.0
    for node in nodes:
        end = node.launched + timedelta(minutes=minutes)
        print(
            f"{node.name:<8} {node.state:<13} {node.public_address or '-':<15} "
            f"{node.private_address or '-':<15} {node.instance_type} {node.id}"
            + (f"  stops {end:%Y-%m-%d %H:%M UTC}" if minutes else "")
        )
    if not nodes:
        print(f"the nodes are gone, the rest isn't: paceline aws down --name {name}")
    return ExitCode.DONE


def _hosts(aws: stack.Aws, name: str) -> int:
    found = stack.find_stack(aws, name)
    nodes = [node for node in stack.find_nodes(aws, name) if node.state == "running"]
    if found is None or not nodes:
        raise UsageError(
            f"no node named {name} runs in {aws.region}: paceline aws status shows more"
        )
    print(ssh.hostfile_text(found, nodes), end="")
    return ExitCode.DONE


def _down(aws: stack.Aws, name: str) -> int:
    with signals_raised():
        stack.delete_nodes(aws, name, note)
    ssh.forget_files(name)  # only now: as long as something is left, the files lead to it
    return ExitCode.DONE


_OTHERS: Mapping[str, Callable[[stack.Aws, str], int]] = {
    "status": _status,
    "hosts": _hosts,
    "down": _down,
}
