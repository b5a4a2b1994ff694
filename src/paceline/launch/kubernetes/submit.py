"""`--on kubernetes`: a training as a TrainJob or a Job, applied and followed by kubectl."""

import json
import secrets
import sys
from contextlib import suppress

from paceline.errors import ExitCode, InfrastructureError
from paceline.launch.cluster import ClusterJob
from paceline.launch.json_fields import Answer
from paceline.launch.kubernetes.follow import RankZeroLog, follow, rank_zero_log
from paceline.launch.kubernetes.indexed_job import job_manifests
from paceline.launch.kubernetes.kubectl import Kubectl, find_kubectl
from paceline.launch.kubernetes.options import KubernetesOptions
from paceline.launch.kubernetes.pods import Manifest, Submission
from paceline.launch.kubernetes.trainjob import JOBSET_LABEL, trainjob_manifests
from paceline.launch.node_command import label
from paceline.launch.stop_signals import StopRequestedError, StopRequests, stop_requests
from paceline.launch.yaml_text import to_yaml

_MOST_OF_A_NAME = 46
"""Of the 63 signs of a host's name; the pods of a TrainJob append `-node-0-123`."""
_DELETING_S = 60.0


def submit(job: ClusterJob, options: KubernetesOptions) -> int:
    """Hand a training to a Kubernetes cluster, and follow it to its end. Blocks unless detached.

    Args:
        job: The training.
        options: Where in the cluster it runs.

    Returns:
        Its exit code.

    Raises:
        UsageError: Something is missing that can be checked by now.
        InfrastructureError: kubectl or the cluster failed.
    """
    submission = new_submission(job, options)
    if job.dry_run:
        print(to_yaml(*manifests(submission, choose_kind(None, options))), end="")
        return ExitCode.DONE
    kubectl = find_kubectl(options)
    kind = choose_kind(kubectl, options)
    _warn(submission, kind)
    with stop_requests() as stop:
        try:
            return _run(kubectl, submission, kind, stop)
        except StopRequestedError:  # a second time, or before there was anything to stop
            print(f"Not waiting for {kind}/{submission.name} any longer", file=sys.stderr)
            return ExitCode.RESUMABLE


def new_submission(job: ClusterJob, options: KubernetesOptions) -> Submission:
    """Give a training a name that no other has."""
    own = secrets.token_hex(3)
    name = label(job.name, own, _MOST_OF_A_NAME)
    return Submission(job=job, options=options, name=name, id=own)


def manifests(submission: Submission, kind: str) -> list[Manifest]:
    """Write all objects of a training, the one that starts it last."""
    return job_manifests(submission) if kind == "job" else trainjob_manifests(submission)


def choose_kind(kubectl: Kubectl | None, options: KubernetesOptions) -> str:
    """Choose between a TrainJob and a Job.

    Args:
        kubectl: Of the cluster; None if it isn't to be asked.
        options: What was said.
    """
    if options.kubernetes_runtime is not None:
        return "trainjob"
    if options.kubernetes_kind != "auto":
        return options.kubernetes_kind
    return "trainjob" if kubectl is not None and kubectl.has_trainjobs() else "job"


def _warn(submission: Submission, kind: str) -> None:
    options = submission.options
    if not options.volume:
        print(
            "There is no --volume: run directory and snapshots are gone with the pods",
            file=sys.stderr,
        )
    if kind == "trainjob" and options.kubernetes_runtime is not None:
        print(
            f"The runtime {options.kubernetes_runtime} decides what is restarted, and how often: "
            "it doesn't know Paceline's exit codes or --max-restarts",
            file=sys.stderr,
        )


def _run(kubectl: Kubectl, submission: Submission, kind: str, stop: StopRequests) -> int:
    target, written = f"{kind}/{submission.name}", manifests(submission, kind)
    try:
        kubectl.apply(written)
        stop.check()
    except (InfrastructureError, StopRequestedError):
        _remove(kubectl, submission, written)
        raise
    _own_the_rest(kubectl, target, submission, written[:-1])
    print(f"Submitted {target}", flush=True)
    if submission.job.detach:
        print(_how_to_look(kubectl, submission, kind), flush=True)
        return ExitCode.DONE
    selector = _selector(submission, kind)
    with rank_zero_log(kubectl) as log:
        try:
            ended = follow(kubectl, target, selector, submission.job.nodes, log, stop)
        except StopRequestedError:
            return _stop(kubectl, submission, target, log, stop)
    if ended.code != ExitCode.DONE:
        print(f"paceline: {target} failed: {ended.reason}", file=sys.stderr)
    if ended.code == ExitCode.RESUMABLE:
        print(_how_to_resume(submission), flush=True)
    return ended.code


def _stop(
    kubectl: Kubectl, submission: Submission, target: str, log: RankZeroLog, stop: StopRequests
) -> int:
    """Delete the job: its pods get SIGTERM, and time to write a snapshot."""
    limit_s = submission.options.grace_s + _DELETING_S
    print(f"Stopping {target}; its pods may write a snapshot first", file=sys.stderr, flush=True)
    stop.again()
    words = ["delete", target, "--cascade=foreground", "--wait", f"--timeout={limit_s:g}s"]
    if stop.run(kubectl.words(*words), limit_s + _DELETING_S) != 0:
        raise InfrastructureError(
            f"{target} couldn't be deleted, and may still run: kubectl delete {target}"
        )
    log.finish(5.0)
    print(_how_to_resume(submission), flush=True)
    return ExitCode.RESUMABLE


def _own_the_rest(
    kubectl: Kubectl, target: str, submission: Submission, rest: list[Manifest]
) -> None:
    """Have the other objects go when the job goes, however that happens."""
    try:
        _set_owner(kubectl, kubectl.get(target), submission, rest)
    except InfrastructureError as error:
        called = "service,networkpolicy,trainingruntime"
        selector = f"app.kubernetes.io/instance={submission.name}"
        print(
            f"{error}\nSo these stay when the job is gone; remove them by: kubectl delete {called} "
            f"--selector={selector}",
            file=sys.stderr,
        )


def _set_owner(
    kubectl: Kubectl, found: Answer, submission: Submission, rest: list[Manifest]
) -> None:
    owner = {
        "apiVersion": found.text("apiVersion"),
        "kind": found.text("kind"),
        "name": submission.name,
        "uid": found["metadata"].text("uid"),
    }
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    for manifest in rest:
        which = f"{str(manifest['kind']).lower()}/{submission.name}"
        kubectl.run("patch", which, "--type=merge", f"--patch={patch}")


def _remove(kubectl: Kubectl, submission: Submission, written: list[Manifest]) -> None:
    """Take back what was made of a training that couldn't be submitted as a whole."""
    names = [f"{str(m['kind']).lower()}/{submission.name}" for m in reversed(written)]
    with suppress(InfrastructureError):
        kubectl.run("delete", *names, "--ignore-not-found", "--wait=false")


def _selector(submission: Submission, kind: str) -> str:
    if kind == "trainjob":
        return f"{JOBSET_LABEL}={submission.name}"
    return f"app.kubernetes.io/instance={submission.name}"


def _how_to_look(kubectl: Kubectl, submission: Submission, kind: str) -> str:
    selector = _selector(submission, kind)
    where = " ".join(kubectl.words()[1:])
    called = f"kubectl {where}".rstrip()
    return (
        f"Output:  {called} logs --follow --selector={selector},batch.kubernetes.io/"
        f"job-completion-index=0\n"
        f"Stop:    {called} delete {kind}/{submission.name}"
    )


def _how_to_resume(submission: Submission) -> str:
    if not submission.options.volume:
        return "There was no --volume, so nothing is left to go on from"
    return (
        "To go on from the newest snapshot, give the same command with --resume and "
        f"--run-dir {submission.run_dir}"
    )


__all__ = ["KubernetesOptions", "manifests", "new_submission", "submit"]
