"""`--on kubernetes`: a training as a TrainJob or a Job, applied and followed by kubectl."""

import json
import secrets
import sys
from contextlib import suppress
from typing import final

from paceline.errors import InfrastructureError
from paceline.launch.base import Launcher
from paceline.launch.cluster import ClusterJob
from paceline.launch.json_fields import Answer
from paceline.launch.kubernetes.indexed_job import job_manifests
from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.kubectl import Kubectl, find_kubectl
from paceline.launch.kubernetes.options import KubernetesOptions
from paceline.launch.kubernetes.pods import Manifest, Submission
from paceline.launch.kubernetes.trainjob import JOBSET_LABEL, trainjob_manifests
from paceline.launch.node_command import label
from paceline.launch.signals import StopRequestedError, StopRequests
from paceline.launch.yaml_text import to_yaml

_MAX_NAME_LENGTH = 46
"""Of the 63 signs of a host's name; the pods of a TrainJob append `-node-0-123`."""


@final
class KubernetesLauncher(Launcher):
    """Makes a TrainJob, or a Job with a Service."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options

    def render(self, job: ClusterJob) -> str:
        """Write the manifests."""
        kind = choose_kind(None, self._options)
        return to_yaml(*manifests(new_submission(job, self._options), kind))

    def submit(self, job: ClusterJob, stop: StopRequests) -> KubernetesJob:
        """Apply the manifests; what was applied in part is taken back."""
        submission = new_submission(job, self._options)
        kubectl = find_kubectl(self._options)
        kind = choose_kind(kubectl, self._options)
        written = manifests(submission, kind)
        _warn(submission, kind)
        # All or nothing: what was made before an error or Ctrl-C is deleted again.
        try:
            kubectl.apply(written)
            stop.check()
        except (InfrastructureError, StopRequestedError):
            _remove(kubectl, submission, written)
            raise
        submitted = KubernetesJob(kubectl, submission, kind, _selector(submission, kind))
        # Kubernetes then deletes the other objects together with the job.
        _delete_with_job(kubectl, submitted.name, submission, written[:-1])
        print(f"Submitted {submitted.name}")
        return submitted


def new_submission(job: ClusterJob, options: KubernetesOptions) -> Submission:
    """Give a training a name that no other has."""
    own = secrets.token_hex(3)
    name = label(job.name, own, _MAX_NAME_LENGTH)
    return Submission(job=job, options=options, name=name, id=own)


def manifests(submission: Submission, kind: str) -> list[Manifest]:
    """Write all objects of a training, the one that starts it last."""
    return job_manifests(submission) if kind == "job" else trainjob_manifests(submission)


def choose_kind(kubectl: Kubectl | None, options: KubernetesOptions) -> str:
    """Choose between a TrainJob and a Job.

    Args:
        kubectl: Of the cluster; None if it isn't to be asked.
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


def _delete_with_job(
    kubectl: Kubectl, target: str, submission: Submission, rest: list[Manifest]
) -> None:
    """Make the job owner of the other objects: Kubernetes then deletes them together with it."""
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


def _set_owner(kubectl: Kubectl, job: Answer, submission: Submission, rest: list[Manifest]) -> None:
    owner = {
        "apiVersion": job.text("apiVersion"),
        "kind": job.text("kind"),
        "name": submission.name,
        "uid": job["metadata"].text("uid"),
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
