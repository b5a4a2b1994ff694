"""Options of `--on skypilot`: which cloud, which machines, where results are kept."""

import re
from dataclasses import dataclass

from paceline.errors import UsageError

_INFRA = re.compile(r"[A-Za-z0-9*][\w.*-]*(/[\w.:*-]+){0,2}")
_GPU = re.compile(r"[A-Za-z0-9][\w.-]*")
_AMOUNT = re.compile(r"[0-9]+(\.[0-9]+)?\+?")
_BUCKET = re.compile(r"[a-z0-9]+://[A-Za-z0-9][\w./-]*")


@dataclass(frozen=True, kw_only=True)
class SkypilotOptions:
    """Which machines SkyPilot is to rent."""

    cloud: str | None = None
    """Cloud, and if need be region and zone, such as gcp or aws/us-east-1. Default: the cheapest of
    those that SkyPilot may use."""

    gpu_type: str | None = None
    """GPU of each node by SkyPilot's name, such as A100; --gpus-per-node says how many (1)."""

    cloud_cpus: str | None = None
    """CPU cores of each node, such as 8, or 8+ for at least so many."""

    cloud_memory: str | None = None
    """Memory of each node in GiB, such as 32+."""

    use_spot: bool = False
    """Take spot machines, by a managed job of SkyPilot: started again after a preemption, it goes
    on from the snapshots in --keep-in."""

    keep_in: str | None = None
    """Bucket that the run directory is kept in, such as s3://my-runs or gs://my-runs."""

    sky_setup: str | None = None
    """Shell command that prepares each node. Default: install this version of Paceline by pip,
    where it isn't there."""

    idle_minutes: int = 10
    """Minutes after the training's end until the machines are given back."""

    def __post_init__(self) -> None:
        """Check what can be checked here.

        Raises:
            UsageError: A value is of no form that SkyPilot takes.
        """
        for flag, value, form, example in (
            ("--cloud", self.cloud, _INFRA, "gcp or aws/us-east-1"),
            ("--gpu-type", self.gpu_type, _GPU, "A100"),
            ("--cloud-cpus", self.cloud_cpus, _AMOUNT, "8 or 8+"),
            ("--cloud-memory", self.cloud_memory, _AMOUNT, "32 or 32+"),
            ("--keep-in", self.keep_in, _BUCKET, "s3://my-runs or gs://my-runs"),
        ):
            if value is not None and not form.fullmatch(value):
                raise UsageError(f"{flag} {value!r}: write for example {example}")
        if self.idle_minutes < 0:
            raise UsageError(f"--idle-minutes is {self.idle_minutes}; it must be at least 0")
        if self.use_spot and self.keep_in is None:
            raise UsageError(
                "--use-spot needs --keep-in: a spot machine's disk goes with it, and the snapshots"
            )
