"""Reads the status of pods and jobs in Kubernetes: how far they are, and how they ended. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import ExitCode
from paceline.launch.base import Outcome
from paceline.launch.json_fields import Answer
from paceline.launch.kubernetes.indexed_job import INDEX
from paceline.launch.kubernetes.pods import CONTAINER

_EXITED = re.compile(r"failed with exit code (\d+)")
_PATIENT = ("ContainerCreating", "PodInitializing")
_OF_TIME = "DeadlineExceeded"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One node's pod; a node that was started again has had several."""

    name: str
    node: int
    made_at: str
    """As Kubernetes writes it, fit for sorting."""
    has_started: bool
    exit_code: int | None
    waits_for: str
    """What it waits for before it can start; empty for nothing in particular."""


def outcome(described: Answer, pods: Iterable[Pod]) -> Outcome | None:
    """Say how a Job or a TrainJob ended; None while it runs.

    Args:
        pods: All of its pods, the failed ones too.
    """
    conditions = {
        condition.text("type"): condition
        for condition in described["status"]["conditions"]
        if condition.text("status") == "True"
    }
    if "Complete" in conditions:
        return Outcome(code=ExitCode.DONE, reason="")
    failed = conditions.get("Failed")
    if failed is None:
        return None
    reason = ": ".join(filter(None, (failed.text("reason"), failed.text("message"))))
    # Out of time is no failure of the training: it can be resumed.
    if failed.text("reason") == _OF_TIME:
        return Outcome(code=ExitCode.RESUMABLE, reason=reason)
    return Outcome(code=_code(failed.text("message"), pods), reason=reason)


def read_pods(listed: Answer) -> list[Pod]:
    """Read a list of pods, the oldest first."""
    return sorted(map(_pod, listed["items"]), key=lambda pod: pod.made_at)


def describe_wait(pods: Iterable[Pod], nodes: int) -> str:
    """Say what the nodes wait for that haven't started; empty once all of them have."""
    newest = {pod.node: pod for pod in pods}
    waiting = [pod for pod in newest.values() if not pod.has_started]
    started = len(newest) - len(waiting)
    if started >= nodes:
        return ""
    why = "; ".join(sorted({pod.waits_for for pod in waiting if pod.waits_for}))
    return f"{started} of {nodes} nodes have started" + (f": {why}" if why else "")


def _code(message: str, pods: Iterable[Pod]) -> int:
    """Choose the exit code of a failed job: a final one of any pod counts before the others'."""
    codes = [pod.exit_code for pod in pods]
    # The pod that decided may be gone already; the job's message still has its exit code.
    named = _EXITED.search(message)
    if named:
        codes.append(int(named[1]))
    for final in (ExitCode.JOB, ExitCode.USAGE):
        if final in codes:
            return final
    return ExitCode.INFRASTRUCTURE


def _pod(described: Answer) -> Pod:
    metadata, status = described["metadata"], described["status"]
    containers = [c for c in status["containerStatuses"] if c.text("name") == CONTAINER]
    state = containers[0]["state"] if containers else Answer(None)
    ended = state["terminated"]
    return Pod(
        name=metadata.text("name"),
        node=metadata["annotations"].count(INDEX),
        made_at=metadata.text("creationTimestamp"),
        has_started=bool(ended) or bool(state["running"]),
        exit_code=ended.count("exitCode") if ended else None,
        waits_for=_waits_for(status, state),
    )


def _waits_for(status: Answer, state: Answer) -> str:
    for condition in status["conditions"]:
        unplaced = condition.text("type") == "PodScheduled" and condition.text("status") == "False"
        if unplaced:
            return condition.text("message") or condition.text("reason")
    waiting = state["waiting"]
    if not waiting or waiting.text("reason") in _PATIENT:
        return ""
    return ": ".join(filter(None, (waiting.text("reason"), waiting.text("message"))))
