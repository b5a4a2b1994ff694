"""What is still there of a cluster, whatever its stack says: looked for by tag, kind by kind."""

from dataclasses import dataclass

from paceline.launch.aws_client import Aws
from paceline.launch.json_fields import Answer
from paceline.provision.aws.nodes import find_nodes
from paceline.provision.aws.template import CLUSTER_TAG


@dataclass(frozen=True, kw_only=True)
class _Kind:
    what: str
    operation: str
    listed: str
    id: str


_KINDS = (
    _Kind(what="disk", operation="describe_volumes", listed="Volumes", id="VolumeId"),
    _Kind(
        what="network interface",
        operation="describe_network_interfaces",
        listed="NetworkInterfaces",
        id="NetworkInterfaceId",
    ),
    _Kind(
        what="elastic address",
        operation="describe_addresses",
        listed="Addresses",
        id="AllocationId",
    ),
    _Kind(
        what="security group",
        operation="describe_security_groups",
        listed="SecurityGroups",
        id="GroupId",
    ),
    _Kind(
        what="launch template",
        operation="describe_launch_templates",
        listed="LaunchTemplates",
        id="LaunchTemplateId",
    ),
    _Kind(
        what="placement group",
        operation="describe_placement_groups",
        listed="PlacementGroups",
        id="GroupName",
    ),
    _Kind(what="key pair", operation="describe_key_pairs", listed="KeyPairs", id="KeyName"),
    _Kind(what="subnet", operation="describe_subnets", listed="Subnets", id="SubnetId"),
    _Kind(
        what="route table",
        operation="describe_route_tables",
        listed="RouteTables",
        id="RouteTableId",
    ),
    _Kind(
        what="internet gateway",
        operation="describe_internet_gateways",
        listed="InternetGateways",
        id="InternetGatewayId",
    ),
    _Kind(what="network", operation="describe_vpcs", listed="Vpcs", id="VpcId"),
)


def find_orphaned(aws: Aws, cluster: str) -> list[str]:
    """List what carries the cluster's tag, as `kind id`; what costs most comes first.

    Raises:
        UsageError: A permission to look is missing; the message names it.
        InfrastructureError: AWS can't be asked.
    """
    nodes = [f"node {node.id}" for node in find_nodes(aws, cluster) if node.state != "terminated"]
    filters = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]}]
    found = list(nodes)
    for kind in _KINDS:
        answer: Answer = aws.call("ec2", kind.operation, Filters=filters)
        for item in answer[kind.listed]:
            if item.text("State") != "deleting" and item.text("Status") != "detaching":
                found.append(f"{kind.what} {item.text(kind.id)}")
    return found
