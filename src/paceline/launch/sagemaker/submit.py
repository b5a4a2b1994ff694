"""`--on sagemaker`: a training job at SageMaker, from the code here to its results in S3."""

import importlib.util
import secrets
import sys
import time
from contextlib import suppress

from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.launch.aws_client import Aws, AwsError, connect
from paceline.launch.cluster import ClusterJob
from paceline.launch.node_command import label
from paceline.launch.sagemaker.follow import Outcome, follow, outcome
from paceline.launch.sagemaker.options import SagemakerOptions
from paceline.launch.sagemaker.request import Submission, check, files, places, request
from paceline.launch.source_archive import code_files, pack
from paceline.launch.stop_signals import StopRequestedError, StopRequests, stop_requests
from paceline.launch.yaml_text import to_yaml

_STOPPING_S = 600.0
ASK_S = 2.0


def submit(job: ClusterJob, options: SagemakerOptions) -> int:
    """Hand a training to SageMaker, and follow it to its end. Blocks unless detached.

    Args:
        job: The training.
        options: How SageMaker is to run it.

    Returns:
        Its exit code.

    Raises:
        UsageError: Something is missing, or the credentials don't permit it.
        InfrastructureError: AWS failed, or can't be reached.
    """
    own = secrets.token_hex(3)
    submission = Submission(job=job, options=options, name=label(job.name, own), id=own)
    check(submission)
    listed = code_files(job.directory)
    if job.dry_run:
        print(f"# {len(listed)} files of {job.directory} would be uploaded")
        print(to_yaml(request(submission)), end="")
        return ExitCode.DONE
    aws = open_account(options)
    uploaded = files(submission, pack(job.directory, listed))
    with stop_requests() as stop:
        try:
            _create(aws, submission, uploaded, stop)
            print(f"Created training job {submission.name}; results: {submission.run_uri}")
            sys.stdout.flush()
            if job.detach:
                return ExitCode.DONE
            return _told(submission, follow(aws, submission.name, stop))
        except StopRequestedError:
            return _stop(aws, submission, stop)


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


def _told(submission: Submission, ended: Outcome) -> int:
    if ended.code == ExitCode.DONE:
        print(f"The run directory is {submission.run_uri}", flush=True)
    else:
        print(f"paceline: {submission.name}: {ended.reason}", file=sys.stderr, flush=True)
    if ended.code in (ExitCode.RESUMABLE, ExitCode.INFRASTRUCTURE):
        print(
            "To go on from the newest snapshot, give the same command with --resume and "
            f"--run-dir {submission.run_uri}",
            flush=True,
        )
    return ended.code


def _stop(aws: Aws, submission: Submission, stop: StopRequests) -> int:
    """Stop the job: its containers get SIGTERM, and two minutes to write a snapshot."""
    name = submission.name
    print(f"Stopping {name}; it may write a snapshot first", file=sys.stderr, flush=True)
    stop.again()
    try:
        if not _ask_to_stop(aws, name):
            return ExitCode.RESUMABLE
        return _told(submission, _wait_for_end(aws, name, stop))
    except (StopRequestedError, InfrastructureError) as error:
        print(
            f"paceline: {error or 'not waiting any longer'}. The job may still run, and cost: aws "
            f"sagemaker stop-training-job --training-job-name {name}",
            file=sys.stderr,
        )
        return ExitCode.INFRASTRUCTURE


def _ask_to_stop(aws: Aws, name: str) -> bool:
    """Ask SageMaker to stop the job. False where there is no such job."""
    try:
        aws.call("sagemaker", "stop_training_job", TrainingJobName=name)
    except AwsError as error:
        if error.code not in ("ValidationException", "ResourceNotFound"):
            raise
        # it has ended by itself, or was never created
        with suppress(AwsError):
            aws.call("sagemaker", "describe_training_job", TrainingJobName=name)
            return True
        return False
    return True


def _wait_for_end(aws: Aws, name: str, stop: StopRequests) -> Outcome:
    deadline_s = time.monotonic() + _STOPPING_S
    while True:
        described = aws.call("sagemaker", "describe_training_job", TrainingJobName=name)
        ended = outcome(described)
        if ended is not None:
            return ended
        if time.monotonic() > deadline_s:
            raise InfrastructureError(f"{name} hasn't stopped within {_STOPPING_S:g} s")
        stop.sleep(ASK_S)
