"""What every template must hold, whatever it was made for: finds what breaks the rules."""

import json
from collections.abc import Iterator
from typing import Any

TAGGED = (
    "VPC InternetGateway RouteTable Subnet SecurityGroup KeyPair PlacementGroup LaunchTemplate "
    "Instance EIP"
).split()
TAG = {"Key": "paceline:cluster", "Value": {"Ref": "Cluster"}}


def broken_rules(text: str) -> list[str]:
    """List what breaks the rules in a template."""
    resources = json.loads(text)["Resources"]
    return [
        *_open_to_the_world(resources),
        *_all_protocols(resources),
        *_wildcards(resources),
        *_instances(resources),
        *_untagged(resources),
    ]


def rules_of(resources: dict[str, Any]) -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """List the rules of all security groups: the resource, whether it lets in, and the rule."""
    for name, resource in resources.items():
        properties = resource["Properties"]
        if resource["Type"] == "AWS::EC2::SecurityGroup":
            # Without rules of its own AWS would add one that lets everything out.
            assert properties["SecurityGroupEgress"], name
            yield from ((name, True, rule) for rule in properties.get("SecurityGroupIngress", []))
            yield from ((name, False, rule) for rule in properties["SecurityGroupEgress"])
        elif resource["Type"].startswith("AWS::EC2::SecurityGroup"):
            yield name, resource["Type"].endswith("Ingress"), properties


def _open_to_the_world(resources: dict[str, Any]) -> Iterator[str]:
    for name, inwards, rule in rules_of(resources):
        world = rule.get("CidrIp") in ("0.0.0.0/0", "::/0") or "CidrIpv6" in rule
        https = (rule["IpProtocol"], rule.get("FromPort"), rule.get("ToPort")) == ("tcp", 443, 443)
        if world and (inwards or not https):
            yield f"{name}: {'from' if inwards else 'to'} the world"


def _all_protocols(resources: dict[str, Any]) -> Iterator[str]:
    """The one exception: what the fabric adapters need, between them alone."""
    for name, inwards, rule in rules_of(resources):
        if rule["IpProtocol"] == "tcp":
            continue
        group = {"Fn::GetAtt": ["FabricGroup", "GroupId"]}
        other = "SourceSecurityGroupId" if inwards else "DestinationSecurityGroupId"
        if rule.get("GroupId") != group or rule.get(other) != group:
            yield f"{name}: protocol {rule['IpProtocol']}"
    for interface in _interfaces(resources):
        fabric = {"Fn::GetAtt": ["FabricGroup", "GroupId"]} in interface["Groups"]
        if fabric != (interface["InterfaceType"] == "efa-only"):
            yield "an interface with an address is in the fabric's group, or one without isn't"


def _wildcards(value: object, where: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            each = item if isinstance(item, list) else [item]
            if key in ("Action", "Resource", "NotAction", "NotResource", "Principal"):
                starred = any(x == "*" or (key == "Action" and "*" in str(x)) for x in each)
                if starred or key.startswith("Not"):
                    yield f"{where}/{key}: {item}"
            yield from _wildcards(item, f"{where}/{key}")
    elif isinstance(value, list):
        for item in value:
            yield from _wildcards(item, where)


def _instances(resources: dict[str, Any]) -> Iterator[str]:
    data = resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]
    if data["MetadataOptions"]["HttpTokens"] != "required":
        yield "IMDSv1"
    if data["InstanceInitiatedShutdownBehavior"] != "terminate":
        yield "a node that stops itself goes on costing"
    for disk in data["BlockDeviceMappings"]:
        if not disk["Ebs"]["Encrypted"] or not disk["Ebs"]["DeleteOnTermination"]:
            yield "a disk isn't encrypted, or outlives its node"
    if not all(interface["DeleteOnTermination"] for interface in _interfaces(resources)):
        yield "an interface outlives its node"


def _untagged(resources: dict[str, Any]) -> Iterator[str]:
    for name, resource in resources.items():
        service, kind = resource["Type"].split("::")[1:]
        properties = resource["Properties"]
        taggable = (service, kind) == ("IAM", "Role") or (service == "EC2" and kind in TAGGED)
        tags = properties.get("Tags", [])
        for each in properties.get("TagSpecifications", []):
            tags = each["Tags"]
        if taggable and TAG not in tags:
            yield f"{name}: no tag"
    specified = resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]["TagSpecifications"]
    kinds = {each["ResourceType"] for each in specified if TAG in each["Tags"]}
    if missing := {"instance", "volume", "network-interface"} - kinds:
        yield f"what nodes bring along has no tag: {missing}"


def _interfaces(resources: dict[str, Any]) -> list[dict[str, Any]]:
    data = resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]
    found: list[dict[str, Any]] = data["NetworkInterfaces"]
    return found
