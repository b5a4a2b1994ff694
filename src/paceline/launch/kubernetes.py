"""`--on kubernetes`: an Indexed Job with a headless Service, or a TrainJob of Kubeflow Trainer."""

import shlex
from collections.abc import Mapping
from typing import final

from paceline.errors import ExitCode
from paceline.launch.base import Launcher, Rendered, run_tool
from paceline.launch.cluster import ClusterJob, Manifest, NoOptions, Plain, merged

PORT = 29500
CONTAINER = "node"
"""The name that Kubeflow's runtimes give to the container that trains."""
_GPU = "nvidia.com/gpu"
_GRACE_S = 120
_MAX_NAME_LENGTH = 46
"""Of a host name's 63 characters; the pods of a TrainJob append `-node-0-123`."""
_NO_SUCH_PROGRAM = (126, 127)
_JOB_NAME = "batch.kubernetes.io/job-name"
_INDEX = "batch.kubernetes.io/job-completion-index"


@final
class KubernetesLauncher(Launcher):
    """Renders manifests, and applies them with kubectl."""

    def __init__(self, options: NoOptions) -> None:
        pass

    def render(self, job: ClusterJob) -> Rendered:
        """Return the manifests: a TrainJob where the patch says `kind: TrainJob`, else a Job."""
        from paceline.launch.yaml_text import to_yaml

        metadata = job.patch.get("metadata")
        named = metadata.get("name") if isinstance(metadata, Mapping) else None
        name = str(named or job.unique_name(_MAX_NAME_LENGTH))  # the Service has it as well
        is_trainjob = job.patch.get("kind") == "TrainJob"
        manifest = merged(trainjob(job, name) if is_trainjob else indexed_job(job, name), job.patch)
        assert isinstance(manifest, Mapping)
        path = job.folder / "kubernetes.yaml"
        # JobSet, on which Kubeflow builds, labels the pods with its own name.
        label = "jobset.sigs.k8s.io/jobset-name" if is_trainjob else _JOB_NAME
        return Rendered(
            files={
                path.name: to_yaml(manifest) if is_trainjob else to_yaml(service(name), manifest)
            },
            submit=("kubectl", "apply", "-f", str(path)),
            follow=f"kubectl logs --follow --selector={label}={name},{_INDEX}=0",
            stop=shlex.join(("kubectl", "delete", "-f", str(path))),
        )

    def submit(self, rendered: Rendered) -> None:
        """Apply the manifests."""
        run_tool(rendered.submit)


def indexed_job(job: ClusterJob, name: str) -> Manifest:
    """Return a Job with a pod for each node, whose index is the node's rank.

    Failures are counted for each index, since all pods fail together: counted together, eight
    nodes would wait ten minutes before their first restart, and use up any limit at once.
    """
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimitPerIndex": job.max_restarts,
        "maxFailedIndexes": 0,
        "podFailurePolicy": exit_code_rules(),
        "podReplacementPolicy": "Failed",  # never two pods of one rank
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
    }
    if job.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    place: list[Plain] = [
        {
            "name": "PET_NODE_RANK",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}},
        },
        {"name": "PET_NNODES", "value": str(job.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(_workers(job) or "auto")},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    container: Manifest = {
        "image": job.check_image("kubernetes"),
        "command": _command(job),
        "env": [*_variables(), *place],
        "resources": _resources(job),
    }
    pods: Manifest = {
        **_pod(container),
        "subdomain": name,
        "restartPolicy": "Never",  # the rules for exit codes allow no other
        "automountServiceAccountToken": False,
    }
    if job.gpus_per_node:
        pods["tolerations"] = [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}]
    spec["template"] = {"spec": pods}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def service(name: str) -> Manifest:
    """Return the headless Service that makes pods find rank 0 by its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods connect while they start
            "selector": {_JOB_NAME: name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def trainjob(job: ClusterJob, name: str) -> Manifest:
    """Return a TrainJob; failures are handled as its runtime says."""
    trainer: Manifest = {
        "image": job.check_image("kubernetes"),
        "command": _command(job),
        "numNodes": job.nodes,
        "resourcesPerNode": _resources(job),
        "env": _variables(),
    }
    if workers := _workers(job):
        trainer["numProcPerNode"] = workers
    jobs: list[Plain] = [{"name": "node", "template": {"spec": {"template": {"spec": _pod({})}}}}]
    patch: Manifest = {
        "manager": "paceline/launcher",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}},
    }
    spec: Manifest = {
        "runtimeRef": {"kind": "ClusterTrainingRuntime", "name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [patch],
    }
    if job.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = job.time_limit_s
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def exit_code_rules() -> Manifest:
    """Return which failures of a pod are final, and which aren't counted.

    All other codes, 70 above all, are worth another start.
    """
    final = sorted((ExitCode.USAGE, ExitCode.JOB, *_NO_SUCH_PROGRAM))
    disrupted: Manifest = {"type": "DisruptionTarget", "status": "True"}
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": _codes(*map(int, final))},
            {"action": "Ignore", "onExitCodes": _codes(int(ExitCode.RESUMABLE))},
            {"action": "Ignore", "onPodConditions": [disrupted]},
        ]
    }


def _codes(*codes: int) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _pod(container: Manifest) -> Manifest:
    """Return the spec of a pod: time for a snapshot, and shared memory for data loaders."""
    mount: Manifest = {"name": "shared-memory", "mountPath": "/dev/shm"}
    return {
        "terminationGracePeriodSeconds": _GRACE_S,
        "containers": [{"name": CONTAINER, **container, "volumeMounts": [mount]}],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def _command(job: ClusterJob) -> list[Plain]:
    return ["python3", "-P", "-m", "paceline", *job.words(job.run_dir)]


def _variables() -> list[Plain]:
    return [{"name": "PYTHONUNBUFFERED", "value": "1"}]


def _workers(job: ClusterJob) -> int | None:
    return job.workers or job.gpus_per_node


def _resources(job: ClusterJob) -> Manifest:
    return {"limits": {_GPU: job.gpus_per_node}} if job.gpus_per_node else {}
