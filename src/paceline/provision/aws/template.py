"""The CloudFormation template: shipped beside this module, with as many nodes as are wanted."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from paceline.errors import UsageError

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

CLUSTER_TAG = "paceline:cluster"
NODE_TAG = "paceline:node"
MOST_BYTES = 51_200
"""A template sent with the request; AWS CloudFormation quotas, "Template body size"."""

_PROTOTYPES = ("Node0", "Node0Address")
_ONLY_ELSEWHERE = {True: ("SubnetId", "VpcId"), False: ("Zone",)}
"""Parameters that a template with a network of its own doesn't have, and one without."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a template has, and how many of it; all else CloudFormation chooses by parameters."""

    nodes: int
    """How many; at least 1."""
    fabric_cards: tuple[int, ...] = ()
    """Indices of the network cards that get a fabric adapter."""
    elastic_addresses: bool = False
    """Whether each node has an elastic address; AWS gives no other with several interfaces."""
    own_network: bool = True
    """Whether the nodes have a network of their own."""


def build_template(shape: Shape) -> str:
    """Write the template of a shape: CloudFormation itself has no loops.

    Returns:
        JSON.

    Raises:
        UsageError: It is more than CloudFormation takes.
    """
    template = read_template()
    resources = _object(template["Resources"])
    # Repeat what there is several of: interfaces, then nodes.
    _set_interfaces(resources, shape.fabric_cards)
    _repeat_nodes(resources, shape.nodes)
    # Decide conditions that are known by now, and leave out what they exclude.
    decided = {
        "OwnNetwork": shape.own_network,
        "UseFabric": bool(shape.fabric_cards),
        "ElasticAddress": shape.elastic_addresses,
    }
    template["Resources"] = _without_unwanted(_object(_decide(resources, decided)), decided)
    if shape.elastic_addresses:
        _object(template["Outputs"]).update(_address_outputs(shape.nodes))
    for name in _ONLY_ELSEWHERE[shape.own_network]:
        del _object(template["Parameters"])[name]
    text = json.dumps(template, separators=(",", ":"))
    if len(text) > MOST_BYTES:
        raise UsageError(
            f"the template of {shape.nodes} nodes has {len(text):,} bytes; CloudFormation takes "
            f"{MOST_BYTES:,}. Ask for fewer nodes"
        )
    return text


def address_output(node: str) -> str:
    """Name the output that holds the allocation id of a node's elastic address."""
    return f"{node}Address"


def _address_outputs(nodes: int) -> dict[str, Json]:
    return {
        address_output(f"Node{index}"): {
            "Value": {"Fn::GetAtt": [f"Node{index}Address", "AllocationId"]}
        }
        for index in range(nodes)
    }


def _set_interfaces(resources: dict[str, Json], fabric_cards: Sequence[int]) -> None:
    data = _object(_object(_object(resources["NodeTemplate"])["Properties"])["LaunchTemplateData"])
    primary, fabric = _list(data["NetworkInterfaces"])
    data["NetworkInterfaces"] = [
        primary,
        *({**_object(fabric), "NetworkCardIndex": card} for card in fabric_cards),
    ]
    data["UserData"] = {"Fn::Base64": {"Fn::Sub": read_script()}}


def _repeat_nodes(resources: dict[str, Json], nodes: int) -> None:
    # Taken before the loop, which overwrites Node0's own resources.
    prototypes = {name: json.dumps(resources[name]) for name in _PROTOTYPES}
    for index in range(nodes):
        for name, text in prototypes.items():
            resources[name.replace("0", str(index))] = json.loads(
                text.replace("Node0", f"Node{index}")
            )


def _decide(value: Json, decided: Mapping[str, bool]) -> Json:
    """Choose the branch of each condition that is decided already."""
    if isinstance(value, list):
        return [_decide(item, decided) for item in value]
    if not isinstance(value, dict):
        return value
    if "Fn::If" in value:
        condition, yes, no = _list(value["Fn::If"])
        if condition in decided:
            return _decide(yes if decided[str(condition)] else no, decided)
    return {key: _decide(item, decided) for key, item in value.items()}


def _without_unwanted(resources: dict[str, Json], decided: Mapping[str, bool]) -> dict[str, Json]:
    """Remove resources that aren't wanted, and all DependsOn that name them."""
    kept: dict[str, Json] = {}
    for name, value in resources.items():
        resource = _object(value)
        if resource.get("Condition") not in decided or decided[str(resource.pop("Condition"))]:
            kept[name] = resource
    for resource in map(_object, kept.values()):
        after: list[Json] = [name for name in _list(resource.pop("DependsOn", [])) if name in kept]
        if after:
            resource["DependsOn"] = after
    return kept


def read_template() -> dict[str, Json]:
    """Read the template as it is shipped: with one node, and one fabric adapter."""
    return _object(json.loads(_shipped("stack.json")))


def read_script() -> str:
    """Read what a node runs at its first start, with CloudFormation's `${names}` in it."""
    return _shipped("node.sh")


def as_parameters(values: Mapping[str, str]) -> list[dict[str, str]]:
    """Write parameters as CloudFormation wants them."""
    return [{"ParameterKey": key, "ParameterValue": value} for key, value in values.items()]


def _shipped(name: str) -> str:
    return (files("paceline.provision.aws") / name).read_text("utf-8")


def _object(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict), value
    return value


def _list(value: Json) -> list[Json]:
    assert isinstance(value, list), value
    return value
