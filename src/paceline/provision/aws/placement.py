"""Where the nodes are placed: an availability zone, a network of their own or the user's subnet."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.aws_client import Aws


@dataclass(frozen=True, kw_only=True)
class Site:
    """A zone, and the user's subnet in it if there is one."""

    zone: str
    subnet: str = ""
    """Empty: the nodes get a network of their own."""
    vpc: str = ""
    public: bool = True
    """Whether nodes there have addresses on the internet."""


def find_site(aws: Aws, instance_type: str, *, zone: str | None, subnet: str | None) -> Site:
    """Choose where the nodes go.

    Raises:
        UsageError: There is no such subnet or zone, or the zone doesn't offer the type.
    """
    site = Site(zone=zone or "") if subnet is None else _of_subnet(aws, subnet)
    filters = [{"Name": "instance-type", "Values": [instance_type]}]
    offerings = aws.pages(
        "ec2",
        "describe_instance_type_offerings",
        "InstanceTypeOfferings",
        LocationType="availability-zone",
        Filters=filters,
    )
    offering = sorted(offer.text("Location") for offer in offerings)
    if not offering:
        raise UsageError(f"no zone of {aws.region} offers {instance_type}")
    if not site.zone:
        return Site(zone=offering[0])
    if site.zone not in offering:
        raise UsageError(
            f"the zone {site.zone} doesn't offer {instance_type}; these do: {', '.join(offering)}"
        )
    return site


def _of_subnet(aws: Aws, subnet: str) -> Site:
    found = aws.first("describe_subnets", "Subnets", "InvalidSubnetID", SubnetIds=[subnet])
    if found is None:
        raise UsageError(f"--subnet: {aws.region} has no subnet {subnet}")
    return Site(
        zone=found.text("AvailabilityZone"),
        subnet=subnet,
        vpc=found.text("VpcId"),
        public=bool(found["MapPublicIpOnLaunch"]),
    )
