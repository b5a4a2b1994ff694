"""A job submitted to SageMaker: its state, and the output of all of its hosts."""

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import final

from paceline.errors import ExitCode, UsageError
from paceline.launch.aws_client import Aws, AwsError
from paceline.launch.base import Outcome, SubmittedJob
from paceline.launch.json_fields import Answer
from paceline.launch.node_command import how_to_resume
from paceline.launch.sagemaker.request import Submission

_GROUP = "/aws/sagemaker/TrainingJobs"
_ENDED = frozenset({"Completed", "Failed", "Stopped"})
_EXITED = re.compile(r"exit code:? (\d+)", re.IGNORECASE)
_FINAL = frozenset({ExitCode.USAGE, ExitCode.JOB})


@final
class HostLogs:
    """What the hosts of a job print, by CloudWatch."""

    def __init__(self, aws: Aws, name: str) -> None:
        self._aws = aws
        self._name = name
        self._tokens: dict[str, str] = {}
        self._may_be_read = True

    def read(self) -> str:
        """Give the new lines of all hosts, each with its host."""
        if not self._may_be_read:
            return ""
        try:
            return "".join(line for stream in self._streams() for line in self._lines(stream))
        except UsageError as error:
            print(f"The hosts' output can't be shown: {error}", file=sys.stderr, flush=True)
            self._may_be_read = False
        except AwsError as error:
            if error.code != "ResourceNotFoundException":  # nothing was printed yet
                raise
        return ""

    def _streams(self) -> list[str]:
        streams = self._aws.pages(
            "logs",
            "describe_log_streams",
            "logStreams",
            logGroupName=_GROUP,
            logStreamNamePrefix=f"{self._name}/",
        )
        return [stream.text("logStreamName") for stream in streams]

    def _lines(self, stream: str) -> Iterator[str]:
        host = host_of(stream)
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
                yield f"[{host}] {event.text('message')}\n"
            # at the end AWS gives the token that it was given
            self._tokens[stream] = answer.text("nextForwardToken")
            if self._tokens[stream] == token or not answer["events"]:
                return


def host_of(stream: str) -> str:
    """Name the host of a log stream, `JOB/algo-1-1700000000`."""
    return re.sub(r"-\d{5,}$", "", stream.rpartition("/")[2])


def outcome(described: Answer) -> Outcome | None:
    """Say how a job ended; None while it goes on."""
    status, detail = described.text("TrainingJobStatus"), described.text("SecondaryStatus")
    if status not in _ENDED:
        return None
    if status == "Completed":
        return Outcome(code=ExitCode.DONE, reason="")
    if status == "Stopped":
        return Outcome(code=ExitCode.RESUMABLE, reason=detail)
    reason = described.text("FailureReason")
    match = _EXITED.search(reason)
    code = int(match[1]) if match else 0
    final_code = code if code in _FINAL else ExitCode.INFRASTRUCTURE
    return Outcome(code=final_code, reason=reason or detail)


def describe(described: Answer) -> str:
    """Say what a job is doing, in AWS's words."""
    changes = list(described["SecondaryStatusTransitions"])
    message = changes[-1].text("StatusMessage") if changes else ""
    state = described.text("SecondaryStatus") or described.text("TrainingJobStatus")
    return f"{state}: {message}" if message else state


@final
class SagemakerJob(SubmittedJob):
    """A training job."""

    poll_s = 5.0
    patience_s = 600.0
    stop_limit_s = 600.0

    def __init__(self, aws: Aws, submission: Submission) -> None:
        """Take over a job that has been submitted."""
        name = submission.name
        super().__init__(name, f"aws sagemaker stop-training-job --training-job-name {name}")
        self._aws = aws
        self._submission = submission
        self._logs = HostLogs(aws, name)
        self._read_s = float("-inf")
        self._has_ended = False

    def poll(self) -> str | Outcome:
        """Describe the job."""
        described = self._aws.call("sagemaker", "describe_training_job", TrainingJobName=self.name)
        ended = outcome(described)
        if ended is None:
            return f"{self.name}: {describe(described)}"
        self._has_ended = True
        if ended.code == ExitCode.DONE:
            return replace(ended, reason=f"The run directory is {self._submission.run_uri}")
        return ended

    def logs(self) -> str | None:
        """Ask CloudWatch, as often as for the state; after the end until it has nothing new."""
        now_s = time.monotonic()
        if now_s - self._read_s < (self.poll_s / 2 if self._has_ended else self.poll_s):
            return ""
        self._read_s = now_s
        text = self._logs.read()
        return None if self._has_ended and not text else text

    def stop(self) -> None:
        """Stop it: its containers get SIGTERM, and two minutes to write a snapshot."""
        try:
            self._aws.call("sagemaker", "stop_training_job", TrainingJobName=self.name)
        except AwsError as error:
            if error.code not in ("ValidationException", "ResourceNotFound"):
                raise  # else it has ended by itself

    def cancel(self) -> Outcome | None:
        """SageMaker has no faster way."""
        raise self.lost("not waiting any longer")

    def resume_hint(self) -> str:
        """Give the options."""
        return how_to_resume(self._submission.run_uri)

    def close(self) -> None:
        """Nothing runs here."""
