"""A plain indexed Job with a headless Service, for clusters without Kubeflow."""

from paceline.launch.kubernetes.pods import (
    PORT,
    Manifest,
    Submission,
    exit_codes,
    pod_spec,
    required_image,
    resources,
    variables,
)
from paceline.launch.yaml_text import Plain

INDEX = "batch.kubernetes.io/job-completion-index"
_KEPT_S = 7 * 24 * 3600


def job_manifests(submission: Submission) -> list[Manifest]:
    """Write everything that a training needs, the Job last: its pods find the rest."""
    listed = [service(submission)]
    if submission.options.network_policy:
        listed.append(network_policy(submission, submission.labels))
    return [*listed, job(submission)]


def job(submission: Submission) -> Manifest:
    """Write the Job: a pod for each node, with its index in its environment.

    Failures are counted for each index, since all pods fail together: counted together, eight
    nodes would wait ten minutes before their first restart, and use up any limit at once.
    The training is done when rank 0 is.
    """
    training = submission.job
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": training.nodes,
        "parallelism": training.nodes,
        "backoffLimitPerIndex": training.max_restarts,
        "maxFailedIndexes": 0,
        "podFailurePolicy": exit_codes(),
        "podReplacementPolicy": "Failed",  # never two pods of one rank
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "ttlSecondsAfterFinished": _KEPT_S,
    }
    if training.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = int(training.time_limit_s)
    pods = pod_spec(submission, _container(submission)) | {"subdomain": submission.name}
    spec["template"] = {"metadata": {"labels": submission.labels}, "spec": pods}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": submission.metadata(),
        "spec": spec,
    }


def service(submission: Submission) -> Manifest:
    """Write the Service without an address of its own, which gives each pod its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": submission.metadata(),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods meet while they start
            "selector": submission.labels,
            "ports": [{"name": "meeting", "port": PORT, "protocol": "TCP"}],
        },
    }


def network_policy(submission: Submission, pods: Manifest) -> Manifest:
    """Write the policy that lets only the job's pods in, on any port: Gloo and NCCL take theirs
    from the kernel.

    Args:
        pods: Labels that its pods have, and no others.
    """
    own: Manifest = {"matchLabels": pods}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": submission.metadata(),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }


def _container(submission: Submission) -> Manifest:
    training = submission.job
    container: Manifest = {
        "image": required_image(training),
        "command": submission.command(),
        "env": [*_place(submission), *variables(submission)],
    }
    needed = resources(training, submission.options)
    return container | ({"resources": needed} if needed else {})


def _place(submission: Submission) -> list[Plain]:
    """Give the node its rank by the variables that Kubeflow's trainer sets."""
    training = submission.job
    workers = training.workers or training.gpus_per_node or "auto"
    index: Manifest = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    plain = {
        "PET_NNODES": training.nodes,
        "PET_NPROC_PER_NODE": workers,
        "PET_MASTER_ADDR": f"{submission.name}-0.{submission.name}",
        "PET_MASTER_PORT": PORT,
    }
    return [
        {"name": "PET_NODE_RANK", "valueFrom": index},
        *({"name": name, "value": str(value)} for name, value in plain.items()),
    ]
