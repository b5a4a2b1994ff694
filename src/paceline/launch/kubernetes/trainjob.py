"""A TrainJob of Kubeflow Trainer v2, with a runtime that understands our exit codes."""

from paceline.launch.kubernetes.indexed_job import network_policy
from paceline.launch.kubernetes.pods import (
    Manifest,
    Submission,
    exit_codes,
    pod_spec,
    required_image,
    resources,
    variables,
)
from paceline.launch.yaml_text import Plain

API = "trainer.kubeflow.org/v1alpha1"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
_REPLICATED = "node"
_MANAGER = "paceline/launcher"


def trainjob_manifests(submission: Submission) -> list[Manifest]:
    """Write everything that a training needs, the TrainJob last."""
    listed: list[Manifest] = []
    if submission.options.network_policy:
        listed.append(network_policy(submission, {JOBSET_LABEL: submission.name}))
    if submission.options.kubernetes_runtime is None:
        listed.append(runtime(submission))
    return [*listed, trainjob(submission)]


def trainjob(submission: Submission) -> Manifest:
    """Write the TrainJob: how many nodes, and what each of them runs."""
    training, options = submission.job, submission.options
    trainer: Manifest = {
        "image": required_image(training),
        "command": submission.command(),
        "numNodes": training.nodes,
    }
    # What isn't set here is the runtime's.
    workers = training.workers or training.gpus_per_node
    if workers:
        trainer["numProcPerNode"] = workers
    needed = resources(training, options)
    if needed:
        trainer["resourcesPerNode"] = needed
    trainer["env"] = variables(submission)
    spec: Manifest = {"runtimeRef": _reference(submission), "trainer": trainer}
    if training.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = int(training.time_limit_s)
    if options.kubernetes_runtime is not None:
        spec["runtimePatches"] = [_patch(submission)]
    return {"apiVersion": API, "kind": "TrainJob", "metadata": submission.metadata(), "spec": spec}


def runtime(submission: Submission) -> Manifest:
    """Write the runtime: like Kubeflow's torch-distributed, and with a policy for failures.

    A pod that fails ends its Job, and all pods are made anew; but where the Job says that an exit
    code was final, all is over.
    """
    pods = pod_spec(submission, {"image": required_image(submission.job)})
    # From the inside out: the Job of a JobSet, its template, the JobSet's own policy.
    child: Manifest = {
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": exit_codes(),
        "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": {"metadata": {"labels": submission.labels}, "spec": pods},
    }
    final: Manifest = {
        "name": "finalExitCode",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    template: Manifest = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": child,
    }
    jobs: Manifest = {
        "failurePolicy": {"maxRestarts": submission.job.max_restarts, "rules": [final]},
        "replicatedJobs": [{"name": _REPLICATED, "template": template}],
    }
    return {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": submission.metadata(),
        "spec": {
            "mlPolicy": {"numNodes": submission.job.nodes, "torch": {}},
            "template": {"spec": jobs},
        },
    }


def _reference(submission: Submission) -> Manifest:
    cluster = submission.options.kubernetes_runtime
    kind = "TrainingRuntime" if cluster is None else "ClusterTrainingRuntime"
    return {
        "apiGroup": API.partition("/")[0],
        "kind": kind,
        "name": cluster or submission.name,
    }


def _patch(submission: Submission) -> Manifest:
    """Change the pods of the cluster's runtime as far as Kubeflow lets a TrainJob do it."""
    pods = pod_spec(submission, {})
    # What Kubeflow takes from the runtime alone.
    for refused in ("restartPolicy", "automountServiceAccountToken", "enableServiceLinks"):
        del pods[refused]
    template: Manifest = {"metadata": {"labels": submission.labels}, "spec": pods}
    jobs: list[Plain] = [{"name": _REPLICATED, "template": {"spec": {"template": template}}}]
    return {
        "manager": _MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }
