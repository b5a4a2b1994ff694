"""Follows a training job at SageMaker: its state, and what all of its hosts print."""

import re
import sys
import time
from dataclasses import dataclass
from typing import final

from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.launch.aws_client import Aws, AwsError
from paceline.launch.json_fields import Answer
from paceline.launch.stop_signals import StopRequests

POLL_S = 5.0
"""Between two questions to AWS."""
_GROUP = "/aws/sagemaker/TrainingJobs"
_PATIENCE_S = 600.0
_LATE_S = 15.0
"""Lines come to CloudWatch some seconds after they were printed."""
_ENDED = frozenset({"Completed", "Failed", "Stopped"})
_EXITED = re.compile(r"exit code:? (\d+)", re.IGNORECASE)
_FINAL = frozenset({ExitCode.USAGE, ExitCode.JOB})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended."""

    code: int
    reason: str


@final
class HostLogs:
    """What the hosts of a job print, by CloudWatch."""

    def __init__(self, aws: Aws, name: str) -> None:
        self._aws = aws
        self._name = name
        self._tokens: dict[str, str] = {}
        self._may_be_read = True

    def show_new(self) -> int:
        """Print the new lines of all hosts, each with its host. Returns how many there were."""
        if not self._may_be_read:
            return 0
        try:
            return sum(self._show(stream) for stream in self._streams())
        except UsageError as error:
            print(f"The hosts' output can't be shown: {error}", file=sys.stderr, flush=True)
            self._may_be_read = False
        except AwsError as error:
            if error.code != "ResourceNotFoundException":  # nothing was printed yet
                raise
        return 0

    def _streams(self) -> list[str]:
        names: list[str] = []
        more: dict[str, str] = {}
        while True:
            answer = self._aws.call(
                "logs",
                "describe_log_streams",
                logGroupName=_GROUP,
                logStreamNamePrefix=f"{self._name}/",
                **more,
            )
            names += [stream.text("logStreamName") for stream in answer["logStreams"]]
            if not answer.text("nextToken"):
                return names
            more = {"nextToken": answer.text("nextToken")}

    def _show(self, stream: str) -> int:
        host = host_of(stream)
        shown = 0
        while True:
            token = self._tokens.get(stream)
            answer = self._aws.call(
                "logs",
                "get_log_events",
                logGroupName=_GROUP,
                logStreamName=stream,
                startFromHead=True,
                **({"nextToken": token} if token else {}),
            )
            for event in answer["events"]:
                print(f"[{host}] {event.text('message')}", flush=True)
                shown += 1
            # at the end AWS gives the token that it was given
            self._tokens[stream] = answer.text("nextForwardToken")
            if self._tokens[stream] == token or not answer["events"]:
                return shown


def host_of(stream: str) -> str:
    """Name the host of a log stream, `JOB/algo-1-1700000000`."""
    return re.sub(r"-\d{5,}$", "", stream.rpartition("/")[2])


def outcome(described: Answer) -> Outcome | None:
    """Say how a job ended; None while it goes on.

    Args:
        described: What DescribeTrainingJob answers.
    """
    status, detail = described.text("TrainingJobStatus"), described.text("SecondaryStatus")
    if status not in _ENDED:
        return None
    if status == "Completed":
        return Outcome(code=ExitCode.DONE, reason="")
    if status == "Stopped":
        return Outcome(code=ExitCode.RESUMABLE, reason=detail)
    reason = described.text("FailureReason")
    found = _EXITED.search(reason)
    code = int(found[1]) if found else 0
    final_code = code if code in _FINAL else ExitCode.INFRASTRUCTURE
    return Outcome(code=final_code, reason=reason or detail)


def follow(aws: Aws, name: str, stop: StopRequests) -> Outcome:
    """Print a job's states and its hosts' lines until it ends. Blocks.

    Args:
        aws: The account.
        name: Of the job.
        stop: Ends it, by StopRequestedError.

    Raises:
        InfrastructureError: AWS can't be asked for minutes.
    """
    logs = HostLogs(aws, name)
    told, since_s = "", time.monotonic()
    while True:
        try:
            described = aws.call("sagemaker", "describe_training_job", TrainingJobName=name)
            logs.show_new()
            since_s = time.monotonic()
        except InfrastructureError as error:
            if time.monotonic() - since_s > _PATIENCE_S:
                raise InfrastructureError(
                    f"{error}\nThe training job {name} may still run, and cost: aws sagemaker "
                    f"stop-training-job --training-job-name {name}"
                ) from error
            stop.sleep(POLL_S)
            continue
        state = describe(described)
        if state != told:
            print(f"{name}: {state}", file=sys.stderr, flush=True)
            told = state
        ended = outcome(described)
        if ended is not None:
            _show_late(logs, stop)
            return ended
        stop.sleep(POLL_S)


def describe(described: Answer) -> str:
    """Say what a job is doing, in AWS's words."""
    changes = list(described["SecondaryStatusTransitions"])
    message = changes[-1].text("StatusMessage") if changes else ""
    state = described.text("SecondaryStatus") or described.text("TrainingJobStatus")
    return f"{state}: {message}" if message else state


def _show_late(logs: HostLogs, stop: StopRequests) -> None:
    """Print the lines that come to CloudWatch after the job's end."""
    deadline_s = time.monotonic() + min(_LATE_S, 3 * POLL_S)
    while time.monotonic() < deadline_s:
        stop.sleep(POLL_S / 2)
        if not logs.show_new():
            return
