"""What `paceline aws up` is going to make: looked up first, shown, and made only then."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.aws_client import Aws
from paceline.provision.aws.image import Image, find_image
from paceline.provision.aws.instance_type import InstanceType, find_type
from paceline.provision.aws.options import (
    NetworkOptions,
    NodeOptions,
    read_network,
    split_bucket,
    split_ports,
)
from paceline.provision.aws.placement import Site, find_site
from paceline.provision.aws.price import Price, find_price
from paceline.provision.aws.quota import Quota, address_quota, vcpu_quota
from paceline.provision.aws.ssh_access import LoginKey, callers_network, find_key
from paceline.provision.aws.template import Shape, build_template


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """All that is known before anything is made."""

    name: str
    region: str
    options: NodeOptions
    type: InstanceType
    image: Image
    site: Site
    key: LoginKey
    ssh_from: str
    ports: tuple[int, int]
    shape: Shape
    price: Price
    quotas: tuple[Quota, ...]

    @property
    def clustered(self) -> bool:
        """Whether the nodes are placed close together."""
        return self.shape.nodes > 1 and self.type.cluster_placement

    def template(self) -> str:
        """Write the CloudFormation template, JSON."""
        return build_template(self.shape)

    def parameters(self) -> Mapping[str, str]:
        """List the template's parameters."""
        bucket, prefix = split_bucket(self.options.bucket) if self.options.bucket else ("", "")
        # EC2 gives an instance with several interfaces no public address by itself.
        given = self.site.public and not self.shape.fabric_cards and self.shape.own_network
        place = (
            {"Zone": self.site.zone}
            if self.shape.own_network
            else {"SubnetId": self.site.subnet, "VpcId": self.site.vpc}
        )
        return {
            "Cluster": self.name,
            "ImageId": self.image.id,
            "InstanceType": self.type.name,
            "RootDevice": self.image.root_device,
            "DiskGb": str(self.options.disk_gb),
            "StopAfterMinutes": str(stop_after_minutes(self.options.max_hours)),
            "SshFrom": self.ssh_from,
            "FirstPort": str(self.ports[0]),
            "LastPort": str(self.ports[1]),
            "KeyName": self.key.key_name,
            "PublicKey": self.key.public_key,
            **place,
            "PublicAddress": _yes(given),
            "Spot": _yes(self.options.spot),
            "ClusterPlacement": _yes(self.clustered),
            "Bucket": bucket,
            "Prefix": prefix,
            "Login": self.options.login,
            "Python": self.options.node_python,
            "Slots": str(self.type.slots),
        }


def make_plan(aws: Aws, name: str, options: NodeOptions, network: NetworkOptions) -> ClusterPlan:
    """Look up all that is needed; makes nothing.

    Raises:
        UsageError: Something that was asked for isn't there, or doesn't fit together.
        InfrastructureError: AWS can't be asked.
    """
    # The instance type and the image have to fit together.
    kind = find_type(aws, options.instance_type)
    if options.spot and not kind.spot:
        raise UsageError(f"there is no spot capacity of {kind.name}: leave out --spot")
    image = find_image(aws, options.image, kind.architecture)
    if options.disk_gb < image.least_disk_gb:
        raise UsageError(
            f"--disk-gb {options.disk_gb} is less than the image's {image.least_disk_gb} GB"
        )
    # Where, and what follows from the type and the place: adapters, addresses, quotas.
    site = find_site(aws, kind.name, zone=network.zone, subnet=network.subnet)
    shape = _shape(options.nodes, kind, site, network.efa)
    vcpus = vcpu_quota(aws, kind.name, options.nodes * kind.vcpus, spot=options.spot)
    addresses = (address_quota(aws, options.nodes),) if shape.elastic_addresses else ()
    return ClusterPlan(
        name=name,
        region=aws.region,
        options=options,
        type=kind,
        image=image,
        site=site,
        key=find_key(aws, network.ssh_key, network.public_key),
        ssh_from=(
            callers_network()
            if network.allow_ssh_from is None
            else read_network(network.allow_ssh_from)
        ),
        ports=split_ports(network.port_range),
        shape=shape,
        price=find_price(aws, kind.name, spot=options.spot, zone=site.zone),
        quotas=(vcpus, *addresses),
    )


def check_quotas(plan: ClusterPlan) -> None:
    """Refuse what AWS would refuse half-way.

    Raises:
        UsageError: A quota is too small; the message has its code, to ask for more.
    """
    for quota in plan.quotas:
        if not quota.fits:
            raise UsageError(
                f"your quota of {quota.what} in {plan.region} is {quota.limit}, {quota.used} are "
                f"in use, and {quota.wanted} more are needed: ask AWS for more (Service Quotas, "
                f"{quota.code}), or take fewer or smaller nodes"
            )


def stop_after_minutes(hours: float) -> int:
    """Round a life time up to minutes."""
    return -int(-hours * 60 // 1)


def _shape(nodes: int, kind: InstanceType, site: Site, efa: bool | None) -> Shape:
    if efa and not kind.fabric_cards:
        raise UsageError(f"{kind.name} has no Elastic Fabric Adapter: leave out --efa")
    wanted = nodes > 1 if efa is None else efa
    cards = kind.fabric_cards if wanted else ()
    return Shape(
        nodes=nodes,
        fabric_cards=cards,
        elastic_addresses=bool(cards) and site.public,
        own_network=not site.subnet,
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
