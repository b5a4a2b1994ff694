"""`--on sagemaker`: a training job at SageMaker, from the code here to its results in S3."""

import importlib.util
import secrets
from contextlib import suppress
from typing import final

from paceline.errors import InfrastructureError, UsageError
from paceline.launch.aws_client import Aws, connect
from paceline.launch.base import Launcher
from paceline.launch.cluster import ClusterJob
from paceline.launch.node_command import label
from paceline.launch.sagemaker.job import SagemakerJob
from paceline.launch.sagemaker.options import SagemakerOptions
from paceline.launch.sagemaker.request import Submission, check, files, places, request
from paceline.launch.signals import StopRequestedError, StopRequests
from paceline.launch.source_archive import code_files, pack
from paceline.launch.yaml_text import to_yaml


@final
class SagemakerLauncher(Launcher):
    """Uploads the code and creates a training job."""

    def __init__(self, options: SagemakerOptions) -> None:
        self._options = options

    def render(self, job: ClusterJob) -> str:
        """Write the request."""
        submission = _submission(job, self._options)
        listed = code_files(job.directory)
        head = f"# {len(listed)} files of {job.directory} would be uploaded\n"
        return head + to_yaml(request(submission))

    def submit(self, job: ClusterJob, stop: StopRequests) -> SagemakerJob:
        """Upload the code and create the job; what was uploaded for nothing is removed."""
        submission = _submission(job, self._options)
        listed = code_files(job.directory)
        aws = open_account(self._options)
        code = pack(job.directory, listed)
        _create(aws, submission, files(submission, code), stop)
        print(f"Created training job {submission.name}; results: {submission.run_uri}")
        return SagemakerJob(aws, submission)


def _submission(job: ClusterJob, options: SagemakerOptions) -> Submission:
    own = secrets.token_hex(3)
    submission = Submission(job=job, options=options, name=label(job.name, own), id=own)
    check(submission)
    return submission


def open_account(options: SagemakerOptions) -> Aws:
    """Open the user's account.

    Raises:
        UsageError: boto3 isn't installed, or there are no credentials.
    """
    if importlib.util.find_spec("boto3") is None:
        raise UsageError(
            "--on sagemaker needs boto3, which isn't installed: pip install 'paceline[sagemaker]'"
        )
    return connect(options.sagemaker_region)


def _create(
    aws: Aws, submission: Submission, uploaded: dict[str, bytes], stop: StopRequests
) -> None:
    """Upload the code and create the job; what was uploaded for nothing is removed."""
    put = places(submission, list(uploaded))
    try:
        for name, bucket, key in put:
            aws.call("s3", "put_object", Bucket=bucket, Key=key, Body=uploaded[name])
            stop.check()
        aws.call("sagemaker", "create_training_job", **request(submission))
    except (UsageError, InfrastructureError, StopRequestedError):
        for _, bucket, key in put:
            with suppress(UsageError, InfrastructureError):
                aws.call("s3", "delete_object", Bucket=bucket, Key=key)
        raise
