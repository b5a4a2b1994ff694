"""The CloudFormation template and its parameters. Pure: AWS isn't called."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from paceline.errors import UsageError
from paceline.provision.aws.options import NodeOptions

CLUSTER_TAG = "paceline:cluster"
NODE_TAG = "paceline:node"
MAX_BYTES = 51_200
"""Of a template in a request; AWS CloudFormation quotas, "Template body size"."""
IMAGE = (
    "/aws/service/deeplearning/ami/{architecture}/oss-nvidia-driver-gpu-pytorch-2.11-ubuntu-24.04/"
    "latest/ami-id"
)
"""SSM parameter of AWS's deep-learning image, which CloudFormation resolves."""
_NETWORK = "Network Gateway GatewayAttachment Routes DefaultRoute Subnet SubnetRoutes".split()


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """What matters of an EC2 instance type."""

    architecture: str
    gpus: int
    fabric_cards: tuple[int, ...]
    """Indices of the network cards that can have an Elastic Fabric Adapter."""
    cluster_placement: bool
    """Whether several can be placed close together."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where the nodes are placed."""

    zone: str
    subnet: str = ""
    """Empty: the nodes get a network of their own."""
    vpc: str = ""
    public: bool = True
    """Whether nodes there have public addresses."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is going to be created."""

    name: str
    options: NodeOptions
    type: InstanceType
    site: Site
    fabric_cards: tuple[int, ...]
    """Indices of the network cards that get a fabric adapter."""
    public_key: str
    ssh_from: str
    """Network that may log in, in CIDR notation."""

    @property
    def elastic_addresses(self) -> bool:
        """Whether each node needs an elastic address: EC2 assigns none if it has several cards."""
        return bool(self.fabric_cards) and self.site.public

    def template(self) -> str:
        """Return the template."""
        return build_template(
            self.options.nodes,
            self.fabric_cards,
            own_network=not self.site.subnet,
            elastic_addresses=self.elastic_addresses,
            image_from_ssm=not (self.options.image or "").startswith("ami-"),
        )

    def parameters(self) -> Mapping[str, str]:
        """Return the template's parameters."""
        options, site = self.options, self.site
        bucket, _, prefix = (options.bucket or "").removeprefix("s3://").partition("/")
        public = site.public and not self.fabric_cards and not site.subnet
        close = options.nodes > 1 and self.type.cluster_placement
        return {
            "Cluster": self.name,
            "ImageId": options.image or IMAGE.format(architecture=self.type.architecture),
            "InstanceType": options.instance_type,
            "RootDevice": options.root_device,
            "DiskGb": str(options.disk_gb),
            "StopAfterMinutes": str(-int(-options.max_hours * 60 // 1)),
            "SshFrom": self.ssh_from,
            "PublicKey": self.public_key,
            **(
                {"Subnet": site.subnet, "Network": site.vpc} if site.subnet else {"Zone": site.zone}
            ),
            "PublicAddress": "yes" if public else "no",
            "Spot": "yes" if options.spot else "no",
            "ClusterPlacement": "yes" if close else "no",
            "Bucket": bucket,
            "Prefix": prefix.strip("/"),
            "Login": options.login,
            "Python": options.node_python,
            "Slots": str(max(1, self.type.gpus)),
        }


def build_template(
    nodes: int,
    fabric_cards: Sequence[int] = (),
    *,
    own_network: bool = True,
    elastic_addresses: bool = False,
    image_from_ssm: bool = True,
) -> str:
    """Return the shipped template with as many nodes as wanted: CloudFormation has no loops.

    Args:
        fabric_cards: Indices of the network cards that get a fabric adapter.
        own_network: Whether the stack has a network; else its subnet and VPC are parameters.
        elastic_addresses: Whether each node has one, with its allocation's id as an output.
        image_from_ssm: Whether the image is the name of an SSM parameter, not an AMI's id.

    Returns:
        JSON.

    Raises:
        UsageError: CloudFormation wouldn't accept its size.
    """
    template = json.loads(_shipped("stack.json"))
    parameters, resources = template["Parameters"], template["Resources"]
    data = resources["NodeTemplate"]["Properties"]["LaunchTemplateData"]
    data["UserData"] = {"Fn::Base64": {"Fn::Sub": read_script()}}
    primary, fabric = data["NetworkInterfaces"]
    fabrics = [{**fabric, "NetworkCardIndex": card} for card in fabric_cards]
    data["NetworkInterfaces"] = [primary, *fabrics]
    if not image_from_ssm:
        parameters["ImageId"]["Type"] = "AWS::EC2::Image::Id"
    # Remove what isn't wanted; a condition of CloudFormation's can't be depended on.
    unwanted = [] if fabric_cards else ["FabricGroup", "FabricIn", "FabricOut"]
    unwanted += [] if elastic_addresses else ["Node0Address"]
    if not own_network:
        unwanted += _NETWORK
        del parameters["Zone"]
        parameters["Network"] = {"Type": "AWS::EC2::VPC::Id"}
        parameters["Subnet"] = {"Type": "AWS::EC2::Subnet::Id"}
    for name in unwanted:
        del resources[name]
    for resource in resources.values():
        if after := [name for name in resource.pop("DependsOn", []) if name in resources]:
            resource["DependsOn"] = after
    # Repeat the node.
    node = json.dumps({name: resources.pop(name) for name in list(resources) if "Node0" in name})
    for index in range(nodes):
        resources |= json.loads(node.replace("Node0", f"Node{index}"))
        if elastic_addresses:
            allocation = {"Fn::GetAtt": [f"Node{index}Address", "AllocationId"]}
            template["Outputs"][f"Node{index}Address"] = {"Value": allocation}
    text = json.dumps(template, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        raise UsageError(
            f"the template of {nodes} nodes has {len(text):,} bytes; CloudFormation accepts "
            f"{MAX_BYTES:,}. Ask for fewer nodes"
        )
    return text


def read_script() -> str:
    """Return what a node runs at its first start, with CloudFormation's `${names}` in it."""
    return _shipped("node.sh")


def _shipped(name: str) -> str:
    return (files("paceline.provision.aws") / name).read_text("utf-8")
