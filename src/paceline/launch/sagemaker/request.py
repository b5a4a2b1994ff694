"""Builds the request that creates a training job at SageMaker. Pure."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from paceline._version import __version__
from paceline.errors import UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.node_command import NodeRun, node_command
from paceline.launch.sagemaker import bootstrap
from paceline.launch.sagemaker.options import SagemakerOptions, split_s3
from paceline.launch.yaml_text import Plain
from paceline.options.durations import parse_duration_s

CHECKPOINTS = "/opt/ml/checkpoints"
"""What SageMaker keeps in S3 while the job runs, and brings back when it starts the job again."""
_CHANNEL = "code"
_INPUT = "/opt/ml/input/data"
_DAY_S = 24 * 3600
_MAX_RETRIES = 30


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One training job."""

    job: ClusterJob
    options: SagemakerOptions
    name: str
    """Different for each submission."""
    id: str
    """What makes it different."""

    @property
    def root(self) -> str:
        """Where everything of this job lies in S3."""
        return f"{str(self.options.s3_output).rstrip('/')}/{self.name}"

    @property
    def code_uri(self) -> str:
        """Where its code lies."""
        return f"{self.root}/code/"

    @property
    def checkpoints_uri(self) -> str:
        """Where its run directory is kept: that of an earlier job, if it goes on with it."""
        if self.job.run_dir.startswith("s3://"):
            return str(self.job.run_dir).rstrip("/").rpartition("/")[0] + "/"
        return f"{self.root}/checkpoints/"

    @property
    def run_name(self) -> str:
        """Name of the run directory."""
        return PurePosixPath(self.job.run_dir.rstrip("/")).name

    @property
    def run_uri(self) -> str:
        """Where the run directory is in S3."""
        return self.checkpoints_uri + self.run_name

    @property
    def time_limit_s(self) -> int:
        """How long it may run; by default a day, as with SageMaker itself."""
        return int(self.job.time_limit_s or _DAY_S)


def check(submission: Submission) -> None:
    """Refuse what SageMaker can't start.

    Raises:
        UsageError: Something is missing, or can't go together.
    """
    job, options = submission.job, submission.options
    for flag, value, example in (
        ("--instance-type", options.instance_type, "ml.g5.12xlarge"),
        ("--role", options.role, "arn:aws:iam::123456789012:role/training"),
        ("--s3-output", options.s3_output, "s3://my-bucket/paceline"),
        ("--image", job.image, "one of AWS's deep-learning containers, or your own in ECR"),
    ):
        if value is None:
            raise UsageError(f"--on sagemaker needs {flag}: {example}")
    if job.run_dir.startswith("s3://") and not job.resume:
        raise UsageError(
            f"--run-dir {job.run_dir} is that of an earlier job: give --resume to resume it"
        )
    if job.resume and not job.run_dir.startswith("s3://"):
        raise UsageError(
            "--resume needs --run-dir s3://...: where the earlier job's run directory is in S3"
        )
    if options.max_wait is not None and _max_wait_s(submission) < submission.time_limit_s:
        raise UsageError(
            f"--max-wait {options.max_wait} is shorter than the time limit of "
            f"{submission.time_limit_s} s"
        )


def files(submission: Submission, code: bytes) -> dict[str, bytes]:
    """Give what is uploaded, by its name below the code's place: it becomes an input channel."""
    run_dir = f"{CHECKPOINTS}/{submission.run_name}"
    python, *words = node_command(
        submission.job, NodeRun(submission=submission.id, run_dir=run_dir)
    )
    described = {"command": words, "requirement": f"paceline=={__version__}", "python": python}
    return {
        "code.tar.gz": code,
        "job.json": json.dumps(described, indent=2).encode(),
        "bootstrap.py": Path(bootstrap.__file__).read_bytes(),
    }


def request(submission: Submission) -> dict[str, Plain]:
    """Write the arguments of SageMaker's CreateTrainingJob."""
    job, options = submission.job, submission.options
    source: dict[str, Plain] = {
        "S3DataType": "S3Prefix",
        "S3Uri": submission.code_uri,
        "S3DataDistributionType": "FullyReplicated",
    }
    # https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
    wanted: dict[str, Plain] = {
        "TrainingJobName": submission.name,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            "TrainingInputMode": "File",
            # the words of the command may be longer than SageMaker allows: they lie in a file
            "ContainerEntrypoint": ["python3", f"{_INPUT}/{_CHANNEL}/bootstrap.py"],
        },
        "RoleArn": options.role,
        "InputDataConfig": [{"ChannelName": _CHANNEL, "DataSource": {"S3DataSource": source}}],
        "OutputDataConfig": {"S3OutputPath": f"{submission.root}/output/"},
        "ResourceConfig": {
            "InstanceType": options.instance_type,
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": options.volume_gb,
        },
        "StoppingCondition": _stopping(submission),
        "CheckpointConfig": {"S3Uri": submission.checkpoints_uri, "LocalPath": CHECKPOINTS},
        "EnableManagedSpotTraining": options.spot,
        "EnableInterContainerTrafficEncryption": options.encrypt_between_nodes,
        "EnableNetworkIsolation": False,
        "Tags": _tags(options),
    }
    return wanted | _optional(submission)


def _stopping(submission: Submission) -> dict[str, Plain]:
    condition: dict[str, Plain] = {"MaxRuntimeInSeconds": submission.time_limit_s}
    if submission.options.spot:
        condition["MaxWaitTimeInSeconds"] = _max_wait_s(submission)
    return condition


def _max_wait_s(submission: Submission) -> int:
    if submission.options.max_wait is not None:
        return int(parse_duration_s(submission.options.max_wait))
    return submission.time_limit_s + _DAY_S


def _tags(options: SagemakerOptions) -> list[Plain]:
    pairs = [("paceline", __version__), *(tuple(tag.split("=", 1)) for tag in options.tag)]
    return [{"Key": key, "Value": value} for key, value in pairs]


def _optional(submission: Submission) -> dict[str, Plain]:
    job, options = submission.job, submission.options
    wanted: dict[str, Plain] = {}
    if job.max_restarts:
        wanted["RetryStrategy"] = {"MaximumRetryAttempts": min(job.max_restarts, _MAX_RETRIES)}
    if options.vpc_subnet:
        wanted["VpcConfig"] = {
            "Subnets": options.vpc_subnet,
            "SecurityGroupIds": options.vpc_security_group,
        }
    return wanted


def places(submission: Submission, names: list[str]) -> list[tuple[str, str, str]]:
    """Say where files go: name, bucket and key of each."""
    bucket, prefix = split_s3(submission.code_uri)
    return [(name, bucket, f"{prefix}/{name}") for name in names]
