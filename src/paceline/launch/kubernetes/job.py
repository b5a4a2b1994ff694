"""A job submitted to Kubernetes: rank 0's output, what its pods wait for, and how it ended."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import final

from paceline.errors import ExitCode, InfrastructureError
from paceline.launch.base import JobLostError, Outcome, SubmittedJob
from paceline.launch.child_command import ChildCommand
from paceline.launch.kubernetes.kubectl import Kubectl
from paceline.launch.kubernetes.outcome import Pod, describe_wait, outcome, read_pods
from paceline.launch.kubernetes.pods import Submission
from paceline.launch.node_command import how_to_resume

_DELETING_S = 60.0
_SHOWN_LINES = "40"


@final
class RankZeroLog:
    """What rank 0's pods print, one after the other."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._pod = ""
        self._logs: ChildCommand | None = None
        self._since = ""

    def follow(self, pods: Sequence[Pod]) -> None:
        """Follow rank 0's newest pod, once it has started; again where the connection was lost."""
        started = [pod for pod in pods if pod.node == 0 and pod.has_started]
        if self._logs is not None or not started:
            return
        newest = started[-1]
        # The same pod: the connection broke, go on from there. Another one: from its beginning.
        if newest.name == self._pod:
            if newest.exit_code is not None:
                return  # all of it was read
            arguments = ["logs", "--follow", f"--since-time={self._since}", newest.name]
        else:
            arguments = ["logs", "--follow", newest.name]
        self._pod = newest.name
        self._logs = ChildCommand(self._kubectl.command(*arguments), is_read=True)

    def read(self) -> str | None:
        """Give what is new; None while no pod is followed."""
        text = None if self._logs is None else self._logs.read()
        if text is None:
            self.close()
        return text

    def close(self) -> None:
        """End the command that follows the pod."""
        if self._logs is not None:
            self._since = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            self._logs.end()
            self._logs = None


@final
class KubernetesJob(SubmittedJob):
    """A Job or a TrainJob, and its pods."""

    poll_s = 2.0

    def __init__(self, kubectl: Kubectl, submission: Submission, kind: str, selector: str) -> None:
        """Take over a job that has been submitted."""
        target = f"{kind}/{submission.name}"
        called = f"kubectl {' '.join(kubectl.command()[1:])}".rstrip()
        how_to_look = (
            f"Output:  {called} logs --follow --selector={selector},batch.kubernetes.io/"
            f"job-completion-index=0\n"
            f"Stop:    {called} delete {target}"
        )
        super().__init__(target, f"{called} delete {target}", how_to_look)
        self.stop_limit_s = submission.options.grace_s + 2 * _DELETING_S
        self._kubectl = kubectl
        self._submission = submission
        self._selector = selector
        self._log = RankZeroLog(kubectl)
        self._deletion: ChildCommand | None = None
        self._has_ended = False

    def poll(self) -> str | Outcome:
        """Ask for the job and its pods; while it is deleted, whether it is gone."""
        if self._deletion is not None:
            return self._poll_deletion(self._deletion)
        try:
            pods = read_pods(self._kubectl.get("pods", f"--selector={self._selector}"))
            ended = outcome(self._kubectl.get(self.name), pods)
        except InfrastructureError as error:
            if "(NotFound)" not in str(error):
                raise
            raise JobLostError(
                f"{self.name} is gone: somebody has deleted it. Its snapshots are still on the "
                "volume, if it had one"
            ) from error
        # Follow rank 0's newest pod, also where the job has just ended: its last lines count.
        self._log.follow(pods)
        if ended is None:
            return describe_wait(pods, self._submission.job.nodes)
        self._has_ended = True
        return replace(ended, details=self._last_lines(pods, ended))

    def logs(self) -> str | None:
        """Give rank 0's."""
        text = self._log.read()
        return "" if text is None and not self._has_ended else text

    def stop(self) -> None:
        """Delete the job: its pods get SIGTERM, and time to write a snapshot."""
        limit_s = self._submission.options.grace_s + _DELETING_S
        waiting = ("--cascade=foreground", "--wait", f"--timeout={limit_s:g}s")
        self._deletion = ChildCommand(self._kubectl.command("delete", self.name, *waiting))

    def cancel(self) -> Outcome:
        """Leave the deletion to the cluster, which has been asked for it."""
        why = "its deletion, which goes on, isn't waited for any longer"
        return Outcome(code=ExitCode.RESUMABLE, reason=why)

    def resume_hint(self) -> str:
        """Give the options, where a volume has kept the run directory."""
        if not self._submission.options.volume:
            return "There was no --volume, so nothing is left to resume from"
        return how_to_resume(self._submission.run_dir)

    def close(self) -> None:
        """End the commands that wait for output, and for the deletion."""
        self._log.close()
        if self._deletion is not None:
            self._deletion.end()

    def _poll_deletion(self, deletion: ChildCommand) -> str | Outcome:
        if deletion.code is None:
            return ""
        if deletion.code:
            raise self.lost("the job couldn't be deleted")
        self._has_ended = True
        return Outcome(code=ExitCode.RESUMABLE, reason="it was stopped")

    def _last_lines(self, pods: Sequence[Pod], ended: Outcome) -> str:
        """Give the last lines of other nodes whose exit code decided how the job ended."""
        if ended.code == ExitCode.DONE:
            return ""
        # Only the newest pod of each node counts, and only those that ended as the job did.
        newest = {pod.node: pod for pod in pods}
        shown = []
        for node, pod in sorted(newest.items()):
            if node and pod.exit_code == ended.code:
                with suppress(InfrastructureError):
                    log = self._kubectl.run("logs", f"--tail={_SHOWN_LINES}", pod.name)
                    shown.append(f"--- node {node}, pod {pod.name}:\n{log}")
        return "\n".join(shown)
