"""Follows a training in Kubernetes: rank 0's output, what the nodes wait for, and its end."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import final

from paceline.errors import ExitCode, InfrastructureError
from paceline.launch.kubernetes.kubectl import Kubectl
from paceline.launch.kubernetes.outcome import (
    Outcome,
    Pod,
    describe_wait,
    outcome,
    read_pods,
)
from paceline.launch.stop_signals import StopRequests

POLL_S = 2.0
"""Between two questions to the cluster."""
_PATIENCE_S = 300.0
_LAST_WORDS_S = 30.0
_SHOWN_LINES = "40"


@final
class RankZeroLog:
    """Prints what rank 0's pods print, one after the other, as it comes."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._pod = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._since = ""

    def attend(self, pods: list[Pod]) -> None:
        """Follow rank 0's newest pod, once it has started; again where the connection was lost."""
        if self._is_open():
            return
        started = [pod for pod in pods if pod.node == 0 and pod.has_started]
        if not started:
            return
        newest = started[-1]
        if newest.name == self._pod:
            if newest.exit_code is not None:
                return  # all of it was printed
            words = ["logs", "--follow", f"--since-time={self._since}", newest.name]
        else:
            words = ["logs", "--follow", newest.name]
        self._pod = newest.name
        self._process = subprocess.Popen(
            self._kubectl.words(*words),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # goes on through Ctrl-C, to show the snapshot
        )

    def finish(self, limit_s: float) -> None:
        """Wait until the pod's output ends, and end the process otherwise."""
        if self._process is None:
            return
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _is_open(self) -> bool:
        if self._process is None:
            return False
        if self._process.poll() is None:
            return True
        self._since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        self._process = None
        return False


@contextmanager
def rank_zero_log(kubectl: Kubectl) -> Iterator[RankZeroLog]:
    """Have a log that ends with the block."""
    log = RankZeroLog(kubectl)
    try:
        yield log
    finally:
        log.finish(0.0)


def follow(
    kubectl: Kubectl,
    target: str,
    selector: str,
    nodes: int,
    log: RankZeroLog,
    stop: StopRequests,
) -> Outcome:
    """Print rank 0's output until the job ends. Blocks.

    Args:
        kubectl: Of the cluster.
        target: Kind and name, such as `job/paceline-digits-3fa9c`.
        selector: Labels of its pods.
        nodes: How many there are.
        log: Of rank 0.
        stop: Ends it, by StopRequestedError.

    Raises:
        InfrastructureError: The cluster can't be asked for minutes, or the job is gone.
    """
    told = ""
    while True:
        pods, ended = _ask(kubectl, target, selector, stop)
        log.attend(pods)
        if ended is not None:
            log.finish(_LAST_WORDS_S)
            _show_failed(kubectl, pods, ended)
            return ended
        waits = describe_wait(pods, nodes)
        if waits and waits != told:
            print(waits, file=sys.stderr, flush=True)
            told = waits
        stop.sleep(POLL_S)


def _ask(
    kubectl: Kubectl, target: str, selector: str, stop: StopRequests
) -> tuple[list[Pod], Outcome | None]:
    """Ask how a job is; a cluster that can't be reached for a while is asked again."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            pods = read_pods(kubectl.get("pods", f"--selector={selector}"))
            return pods, outcome(kubectl.get(target), pods)
        except InfrastructureError as error:
            if "(NotFound)" in str(error):
                raise InfrastructureError(
                    f"{target} is gone: somebody has deleted it. Its snapshots are still on the "
                    "volume, if it had one"
                ) from error
            if time.monotonic() > deadline_s:
                raise InfrastructureError(
                    f"{error}\nThe training may still run: kubectl get {target}"
                ) from error
            stop.sleep(POLL_S)


def _show_failed(kubectl: Kubectl, pods: list[Pod], ended: Outcome) -> None:
    """Print the last lines of other nodes whose exit code decided how the job ended."""
    if ended.code == ExitCode.DONE:
        return
    newest = {pod.node: pod for pod in pods}
    for node, pod in sorted(newest.items()):
        if node and pod.exit_code == ended.code:
            with suppress(InfrastructureError):
                said = kubectl.run("logs", f"--tail={_SHOWN_LINES}", pod.name)
                print(f"--- node {node}, pod {pod.name}:\n{said}", file=sys.stderr, flush=True)
