"""What is still there of a cluster, whatever its stack says: looked for by tag, kind by kind."""

from paceline.launch.aws_client import Aws
from paceline.launch.json_fields import Answer
from paceline.provision.aws.nodes import find_nodes
from paceline.provision.aws.template import CLUSTER_TAG

_KINDS = (
    ("disk", "describe_volumes", "Volumes", "VolumeId"),
    ("network interface", "describe_network_interfaces", "NetworkInterfaces", "NetworkInterfaceId"),
    ("elastic address", "describe_addresses", "Addresses", "AllocationId"),
    ("security group", "describe_security_groups", "SecurityGroups", "GroupId"),
    ("launch template", "describe_launch_templates", "LaunchTemplates", "LaunchTemplateId"),
    ("placement group", "describe_placement_groups", "PlacementGroups", "GroupName"),
    ("key pair", "describe_key_pairs", "KeyPairs", "KeyName"),
    ("subnet", "describe_subnets", "Subnets", "SubnetId"),
    ("route table", "describe_route_tables", "RouteTables", "RouteTableId"),
    ("internet gateway", "describe_internet_gateways", "InternetGateways", "InternetGatewayId"),
    ("network", "describe_vpcs", "Vpcs", "VpcId"),
)
"""By kind: EC2's operation, the list in its answer, and what names an item of it."""


def find_orphaned(aws: Aws, cluster: str) -> list[str]:
    """List what carries the cluster's tag, as `kind id`; what costs most comes first.

    Raises:
        UsageError: A permission to look is missing; the message names it.
        InfrastructureError: AWS can't be asked.
    """
    nodes = [f"node {node.id}" for node in find_nodes(aws, cluster) if node.state != "terminated"]
    filters = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]}]
    found = list(nodes)
    for kind, operation, listed, id_name in _KINDS:
        answer: Answer = aws.call("ec2", operation, Filters=filters)
        for item in answer[listed]:
            if item.text("State") != "deleting" and item.text("Status") != "detaching":
                found.append(f"{kind} {item.text(id_name)}")
    return found
