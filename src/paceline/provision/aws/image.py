"""The machine image of the nodes: AWS's deep-learning image with PyTorch, or the user's."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.aws_client import Aws

_VERSIONS = ("2.12", "2.11")
"""Newest first; older ones have a PyTorch that Paceline doesn't support."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """A machine image."""

    id: str
    name: str
    root_device: str
    least_disk_gb: int
    """Size of the disk it was made from."""


def image_parameters(architecture: str) -> tuple[str, ...]:
    """Name the SSM parameters that hold the newest deep-learning images, the best one first.

    Args:
        architecture: `x86_64` or `arm64`.
    """
    return tuple(
        f"/aws/service/deeplearning/ami/{architecture}/"
        f"oss-nvidia-driver-gpu-pytorch-{version}-ubuntu-24.04/latest/ami-id"
        for version in _VERSIONS
    )


def find_image(aws: Aws, wanted: str | None, architecture: str) -> Image:
    """Look the image up.

    Args:
        wanted: An AMI's id, the name of an SSM parameter that holds one, or None.

    Raises:
        UsageError: It isn't in the region, or is for another architecture.
    """
    image_id = (
        wanted if wanted and wanted.startswith("ami-") else _look_up(aws, wanted, architecture)
    )
    found = aws.first("describe_images", "Images", "InvalidAMIID", ImageIds=[image_id])
    if found is None:
        raise UsageError(f"there is no image {image_id} in {aws.region} that you may use")
    if (found.text("Architecture") or architecture) != architecture:
        raise UsageError(
            f"the image {image_id} is for {found.text('Architecture')}, the instance type for "
            f"{architecture}"
        )
    disks = [disk["Ebs"] for disk in found["BlockDeviceMappings"]]
    return Image(
        id=image_id,
        name=found.text("Name"),
        root_device=found.text("RootDeviceName") or "/dev/sda1",
        least_disk_gb=max((disk.count("VolumeSize") for disk in disks), default=0),
    )


def _look_up(aws: Aws, wanted: str | None, architecture: str) -> str:
    names = (wanted,) if wanted else image_parameters(architecture)
    answer = aws.call("ssm", "get_parameters", Names=list(names))
    found = {p.text("Name"): p.text("Value") for p in answer["Parameters"]}
    for name in names:
        if name in found:
            return found[name]
    raise UsageError(
        f"{aws.region} has no SSM parameter {' or '.join(names)}: give --image with an AMI's id or "
        "the name of a parameter that holds one"
    )
