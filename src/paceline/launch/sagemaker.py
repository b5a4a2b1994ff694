"""`--on sagemaker`: a request of SageMaker's CreateTrainingJob, submitted by boto3."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import final

from paceline.errors import UsageError
from paceline.launch.base import Launcher, Rendered
from paceline.launch.cluster import ClusterJob, Manifest, merged

CHECKPOINTS = "/opt/ml/checkpoints"
"""What SageMaker keeps in S3 while the job runs, and brings back when it starts the job again."""
_DAY_S = 24 * 3600
_MAX_RETRIES = 30
_MAX_NAME_LENGTH = 63
_NEEDED = {
    "instance_type": "ml.g5.12xlarge",
    "role": "arn:aws:iam::123456789012:role/training",
    "s3_output": "s3://my-bucket/paceline",
}


@dataclass(frozen=True, kw_only=True)
class SagemakerOptions:
    """How SageMaker runs a training job."""

    instance_type: str | None = None
    """Instance type of each node, such as ml.g5.12xlarge."""

    role: str | None = None
    """Role that the job takes, by its ARN: it reads and writes --s3-output, and writes logs."""

    s3_output: str | None = None
    """Where run directories are kept, such as s3://my-bucket/paceline."""


@final
class SagemakerLauncher(Launcher):
    """Renders the request as JSON, and submits it."""

    def __init__(self, options: SagemakerOptions) -> None:
        self._options = options

    def render(self, job: ClusterJob) -> Rendered:
        """Return the request."""
        for option, example in _NEEDED.items():
            if getattr(self._options, option) is None:
                flag = f"--{option.replace('_', '-')}"
                raise UsageError(f"--on sagemaker needs {flag}, such as {example}")
        if job.gpus_per_node is not None:
            raise UsageError(
                "--gpus-per-node has no effect with --on sagemaker: --instance-type says how many "
                "GPUs a node has"
            )
        request = merged(create_training_job(job, self._options), job.patch)
        assert isinstance(request, Mapping)
        path, name = job.folder / "sagemaker.json", request["TrainingJobName"]
        logs = f"aws logs tail /aws/sagemaker/TrainingJobs --follow --log-stream-name-prefix {name}"
        return Rendered(
            files={path.name: json.dumps(request, indent=2) + "\n"},
            submit=("aws", "sagemaker", "create-training-job", f"--cli-input-json=file://{path}"),
            follow=logs,
            stop=f"aws sagemaker stop-training-job --training-job-name {name}",
        )

    def submit(self, rendered: Rendered) -> None:
        """Create the training job."""
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise UsageError("--submit needs boto3: pip install 'paceline[sagemaker]'") from error
        (text,) = rendered.files.values()
        try:
            answer = boto3.client("sagemaker").create_training_job(**json.loads(text))
        except (BotoCoreError, ClientError) as error:
            raise UsageError(f"not submitted: {error}") from error
        print(f"Created {answer['TrainingJobArn']}")


def create_training_job(job: ClusterJob, options: SagemakerOptions) -> Manifest:
    """Return the arguments of SageMaker's CreateTrainingJob.

    Run directories of one name share their place in S3: so the same command goes on from it.
    https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
    """
    name = PurePosixPath(job.run_dir).name
    output = f"{str(options.s3_output).rstrip('/')}/{name}"
    command = ["python3", "-P", "-m", "paceline", *job.words(f"{CHECKPOINTS}/{name}")]
    request: Manifest = {
        "TrainingJobName": job.unique_name(_MAX_NAME_LENGTH),
        "AlgorithmSpecification": {
            "TrainingImage": job.check_image("sagemaker"),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": command,
        },
        "RoleArn": options.role,
        "OutputDataConfig": {"S3OutputPath": f"{output}/output"},
        "ResourceConfig": {
            "InstanceType": options.instance_type,
            "InstanceCount": job.nodes,
            "VolumeSizeInGB": 100,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": job.time_limit_s or _DAY_S},
        "CheckpointConfig": {"S3Uri": f"{output}/checkpoints", "LocalPath": CHECKPOINTS},
        "Environment": {"PYTHONUNBUFFERED": "1"},
    }
    if job.max_restarts:
        retries = min(job.max_restarts, _MAX_RETRIES)
        request["RetryStrategy"] = {"MaximumRetryAttempts": retries}
    return request
