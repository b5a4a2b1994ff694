"""How much an account may run at once: AWS counts virtual CPUs, by families of instance types."""

import re
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.launch.aws_client import Aws, AwsError

# Codes of "Running On-Demand ... instances" and "All ... Spot Instance Requests": Amazon EC2
# endpoints and quotas, AWS General Reference.
_ON_DEMAND = {
    "standard": "L-1216C47A",
    "g": "L-DB2E81BA",
    "p": "L-417A185B",
    "inf": "L-1945791B",
    "trn": "L-2C3B7624",
    "dl": "L-6E869C2A",
    "f": "L-74FC7D96",
    "x": "L-7295265B",
}
_SPOT = {
    "standard": "L-34B43A08",
    "g": "L-3819A6DF",
    "p": "L-7212CCBC",
    "p5": "L-C4BD4855",
    "inf": "L-B5D1601B",
    "trn": "L-6B0D517C",
    "f": "L-88CF9481",
    "x": "L-E3A00192",
}
_ELASTIC_ADDRESSES = "L-0263D0A3"
_NAME = re.compile(r"(inf|trn|dl|vt|hpc|mac|u-?|[a-z])[a-z]*(\d*)")
_LETTERS = {"vt": "g", **dict.fromkeys("acdhimrtz", "standard")}


@dataclass(frozen=True, kw_only=True)
class Quota:
    """One quota, and what is wanted of it."""

    what: str
    wanted: int
    used: int = 0
    limit: int | None = None
    """None where it couldn't be found."""
    note: str = ""
    """Why not."""
    code: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is enough, as far as is known."""
        return self.limit is None or self.used + self.wanted <= self.limit


def quota_family(instance_type: str, *, spot: bool) -> str | None:
    """Name the family of types that AWS counts together; None for one we don't know.

    Args:
        instance_type: For example `g5.12xlarge`.
        spot: Spot capacity has quotas of its own, and p5 one apart.
    """
    found = _NAME.match(instance_type)
    if found is None:
        return None
    family = _LETTERS.get(found[1], found[1])
    if spot and family == "p" and found[2].isdigit() and int(found[2]) >= 5:
        family = f"p{found[2]}"
    return family if family in (_SPOT if spot else _ON_DEMAND) else None


def vcpu_quota(aws: Aws, instance_type: str, wanted: int, *, spot: bool) -> Quota:
    """Compare virtual CPUs that are wanted with the quota and what runs; never fails.

    Args:
        wanted: Virtual CPUs of all new nodes together.
    """
    family = quota_family(instance_type, spot=spot)
    what = f"vCPUs of {'spot' if spot else 'on-demand'} {_instances_text(family, instance_type)}"
    if family is None:
        return Quota(what=what, wanted=wanted, note="the quota of this family isn't known here")
    code = (_SPOT if spot else _ON_DEMAND)[family]
    try:
        limit = _limit(aws, code)
        used = _running_vcpus(aws, family, spot=spot)
    except PacelineError as error:
        return Quota(what=what, wanted=wanted, note=str(error), code=code)
    return Quota(what=what, wanted=wanted, used=used, limit=limit, code=code)


def address_quota(aws: Aws, wanted: int) -> Quota:
    """Compare elastic addresses that are wanted with the quota and what is taken; never fails."""
    what = "elastic addresses"
    try:
        limit = _limit(aws, _ELASTIC_ADDRESSES)
        used = sum(1 for _ in aws.call("ec2", "describe_addresses")["Addresses"])
    except PacelineError as error:
        return Quota(what=what, wanted=wanted, note=str(error), code=_ELASTIC_ADDRESSES)
    return Quota(what=what, wanted=wanted, used=used, limit=limit, code=_ELASTIC_ADDRESSES)


def _instances_text(family: str | None, instance_type: str) -> str:
    if family is None:
        return instance_type
    return "standard instances" if family == "standard" else f"{family.upper()} instances"


def _limit(aws: Aws, code: str) -> int:
    named = {"ServiceCode": "ec2", "QuotaCode": code}
    try:
        answer = aws.call("service-quotas", "get_service_quota", **named)
    except AwsError:  # an account that never asked for more has AWS's default alone
        answer = aws.call("service-quotas", "get_aws_default_service_quota", **named)
    return answer["Quota"].count("Value")


def _running_vcpus(aws: Aws, family: str, *, spot: bool) -> int:
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    total = 0
    for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=states):
        for instance in reservation["Instances"]:
            is_spot = instance.text("InstanceLifecycle") == "spot"
            kind = quota_family(instance.text("InstanceType"), spot=spot)
            if is_spot == spot and kind == family:
                cpus = instance["CpuOptions"]
                total += cpus.count("CoreCount") * cpus.count("ThreadsPerCore", 1)
    return total
