"""What an EC2 instance type has: processors, GPUs, fabric adapters."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.aws_client import Aws
from paceline.launch.json_fields import Answer


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """One instance type."""

    name: str
    architecture: str
    """As in the names of images: `x86_64` or `arm64`."""
    vcpus: int
    gpus: int
    fabric_cards: tuple[int, ...]
    """Indices of the network cards that can have an Elastic Fabric Adapter."""
    cluster_placement: bool
    """Whether several can be placed close together."""
    spot: bool
    """Whether there is spot capacity of it."""

    @property
    def slots(self) -> int:
        """Workers on a node: one a GPU; one where it has none."""
        return max(1, self.gpus)


def find_type(aws: Aws, name: str) -> InstanceType:
    """Ask AWS about an instance type.

    Raises:
        UsageError: There is no such type in the region.
    """
    listed, missing = "InstanceTypes", "InvalidInstanceType"
    found = aws.first("describe_instance_types", listed, missing, InstanceTypes=[name])
    if found is None:
        raise UsageError(f"there is no instance type {name} in {aws.region}")
    return read_type(found)


def read_type(answer: Answer) -> InstanceType:
    """Read one entry of describe_instance_types."""
    architectures = answer["ProcessorInfo"]["SupportedArchitectures"].texts()
    strategies = answer["PlacementGroupInfo"]["SupportedStrategies"].texts()
    return InstanceType(
        name=answer.text("InstanceType"),
        architecture="arm64" if "arm64" in architectures else "x86_64",
        vcpus=answer["VCpuInfo"].count("DefaultVCpus"),
        gpus=sum(gpu.count("Count") for gpu in answer["GpuInfo"]["Gpus"]),
        fabric_cards=_fabric_cards(answer["NetworkInfo"]),
        cluster_placement="cluster" in strategies,
        spot="spot" in answer["SupportedUsageClasses"].texts(),
    )


def _fabric_cards(network: Answer) -> tuple[int, ...]:
    """Choose the cards: one adapter each.

    Where there are more cards than adapters, the first is the one without: it carries addresses.
    Source: "Maximize network bandwidth on Amazon EC2 instances with multiple network cards", EC2
    User Guide.
    """
    if not network["EfaSupported"]:
        return ()
    cards = sorted(card.count("NetworkCardIndex") for card in network["NetworkCards"]) or [0]
    adapters = network["EfaInfo"].count("MaximumEfaInterfaces", 1)
    return tuple(cards[-adapters:])
