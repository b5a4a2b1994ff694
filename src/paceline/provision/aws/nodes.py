"""The nodes of a cluster, as EC2 describes them."""

from dataclasses import dataclass
from datetime import UTC, datetime

from paceline.launch.aws_client import Aws
from paceline.launch.json_fields import Answer
from paceline.provision.aws.template import CLUSTER_TAG, NODE_TAG

_GONE = ("shutting-down", "terminated")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One instance."""

    id: str
    name: str
    """`Node0`, `Node1` and so on."""
    state: str
    instance_type: str
    zone: str
    launched: datetime
    private_address: str = ""
    public_address: str = ""
    interface: str = ""
    """Its primary network interface's id."""
    spot: bool = False
    stack: str = ""
    """Id of the stack that it belongs to."""
    stopped: datetime | None = None
    """When it was stopped, if AWS says so."""

    @property
    def running(self) -> bool:
        """Whether it costs money."""
        return self.state in ("pending", "running")

    @property
    def gone(self) -> bool:
        """Whether it is ended, or about to be."""
        return self.state in _GONE

    @property
    def address(self) -> str:
        """Where ssh reaches it: its public address, or the private one of a private subnet."""
        return self.public_address or self.private_address


def find_nodes(aws: Aws, cluster: str) -> list[Instance]:
    """List a cluster's nodes, ended ones too as long as AWS shows them; in their order."""
    filters = [
        {"Name": f"tag:{CLUSTER_TAG}", "Values": [cluster]},
        {"Name": "tag-key", "Values": [NODE_TAG]},
    ]
    reservations = aws.pages("ec2", "describe_instances", "Reservations", Filters=filters)
    found = [read_node(item) for each in reservations for item in each["Instances"]]
    return sorted(found, key=lambda node: (len(node.name), node.name, node.id))


def read_node(answer: Answer) -> Instance:
    """Read one instance of describe_instances."""
    interfaces = {
        each["Attachment"].count("DeviceIndex"): each.text("NetworkInterfaceId")
        for each in answer["NetworkInterfaces"]
    }
    return Instance(
        id=answer.text("InstanceId"),
        name=answer.tags().get(NODE_TAG, answer.text("InstanceId")),
        state=answer["State"].text("Name"),
        instance_type=answer.text("InstanceType"),
        zone=answer["Placement"].text("AvailabilityZone"),
        launched=answer.time("LaunchTime") or datetime.now(UTC),
        private_address=answer.text("PrivateIpAddress"),
        public_address=answer.text("PublicIpAddress"),
        interface=interfaces.get(0, ""),
        spot=answer.text("InstanceLifecycle") == "spot",
        stack=answer.tags().get("aws:cloudformation:stack-id", ""),
        stopped=_stop_time(answer.text("StateTransitionReason")),
    )


def _stop_time(reason: str) -> datetime | None:
    """Read the time in `User initiated (2026-11-21 13:00:00 GMT)`."""
    _, _, text = reason.partition("(")
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S GMT)").replace(tzinfo=UTC)
    except ValueError:
        return None
