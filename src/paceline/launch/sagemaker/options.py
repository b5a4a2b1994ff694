"""Options of `--on sagemaker`: which instances, under which role, and where results go."""

import re
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.options.durations import parse_duration_s

_INSTANCE = re.compile(r"ml\.[a-z0-9-]+\.[a-z0-9]+")
_ROLE = re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+")
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w!.*'()/-]*)?")
_TAG = re.compile(r"[\w .:/+@-]{1,128}=[\w .:/=+@-]{0,256}")


@dataclass(frozen=True, kw_only=True)
class SagemakerOptions:
    """How SageMaker runs a training job."""

    instance_type: str | None = None
    """Instance type of each node, such as ml.g5.12xlarge."""

    role: str | None = None
    """Role that the job takes, by its ARN: it reads and writes --s3-output, and writes logs."""

    s3_output: str | None = None
    """Where code, snapshots and results go, such as s3://my-bucket/paceline."""

    spot: bool = False
    """Take spot capacity: cheaper. After an interruption SageMaker starts the job again, which goes
    on from its snapshots."""

    max_wait: str | None = None
    """How long a spot job may take in all, waiting for capacity included. Default: a day more than
    --time-limit."""

    volume_gb: int = 100
    """Disk of each node for data and snapshots, in GB."""

    tag: tuple[str, ...] = ()
    """Tag of the job, such as team=vision. Repeat it for more."""

    encrypt_between_nodes: bool = False
    """Encrypt what the nodes send to each other. It can be much slower."""

    vpc_subnet: tuple[str, ...] = ()
    """Subnet of your own to run in; repeat it for more. Default: a network of SageMaker's."""

    vpc_security_group: tuple[str, ...] = ()
    """Security group for nodes in --vpc-subnet; it must let its members reach each other."""

    sagemaker_region: str | None = None
    """AWS region. Default: that of your AWS configuration."""

    def __post_init__(self) -> None:
        """Check what can be checked without AWS.

        Raises:
            UsageError: A value is of no form that SageMaker takes.
        """
        for flag, value, form, example in (
            ("--instance-type", self.instance_type, _INSTANCE, "ml.g5.12xlarge"),
            ("--role", self.role, _ROLE, "arn:aws:iam::123456789012:role/training"),
            ("--s3-output", self.s3_output, _S3, "s3://my-bucket/paceline"),
            *(("--tag", tag, _TAG, "team=vision") for tag in self.tag),
        ):
            if value is not None and not form.fullmatch(value):
                raise UsageError(f"{flag} {value!r}: write for example {example}")
        if self.volume_gb < 1:
            raise UsageError(f"--volume-gb is {self.volume_gb}; it must be at least 1")
        if self.max_wait is not None:
            parse_duration_s(self.max_wait, "--max-wait")
            if not self.spot:
                raise UsageError("--max-wait is of spot jobs: give --spot, or leave it out")
        if bool(self.vpc_subnet) != bool(self.vpc_security_group):
            raise UsageError("--vpc-subnet and --vpc-security-group need each other")


def split_s3(uri: str) -> tuple[str, str]:
    """Split `s3://bucket/prefix` into bucket and prefix, without slashes at its ends."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix.strip("/")
