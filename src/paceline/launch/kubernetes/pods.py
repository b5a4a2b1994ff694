"""The pods of a training in Kubernetes: what each node runs, with what, and how it is stopped."""

from dataclasses import dataclass

from paceline.errors import ExitCode, UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.kubernetes.options import KubernetesOptions, split_volume
from paceline.launch.node_command import NodeRun, node_command, run_dir_on
from paceline.launch.yaml_text import Plain

CONTAINER = "node"
"""The name that Kubeflow's runtimes give to the container that trains."""
PORT = 29500
_SHARED_MEMORY = "shared-memory"
_LOST_NODE_S = 30
_NO_SUCH_PROGRAM = (126, 127)
"""A container's exit codes where its command can't be run, or isn't there."""

Manifest = dict[str, Plain]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One training, as it is written down for the cluster."""

    job: ClusterJob
    options: KubernetesOptions
    name: str
    """A DNS label, different for each submission."""
    id: str
    """What makes the name different."""

    @property
    def run_dir(self) -> str:
        """Where the run directory lies in the pods: on the first volume, if there is one."""
        if not self.options.volume:
            return self.job.run_dir
        return run_dir_on(split_volume(self.options.volume[0])[1], self.job.run_dir)

    @property
    def labels(self) -> Manifest:
        """Labels of everything that is made, and of the pods."""
        return {"app.kubernetes.io/name": "paceline", "app.kubernetes.io/instance": self.name}

    def metadata(self) -> Manifest:
        """Give the metadata of an object of this name."""
        named: Manifest = {"name": self.name, "labels": self.labels}
        return named | ({"namespace": self.options.namespace} if self.options.namespace else {})

    def command(self) -> list[str]:
        """Give what each pod runs."""
        return node_command(self.job, NodeRun(submission=self.id, run_dir=self.run_dir))


def pod_spec(submission: Submission, container: Manifest) -> Manifest:
    """Write a pod's spec.

    Args:
        container: What its container has beside what every pod of ours has.
    """
    options = submission.options
    spec: Manifest = {
        "restartPolicy": "Never",  # the Job's policy on exit codes allows no other
        "terminationGracePeriodSeconds": options.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": _pod_security(options),
        "tolerations": _tolerations(),
    }
    spec |= _placing(options)
    own: Manifest = {
        "name": CONTAINER,
        "securityContext": _container_security(),
        "volumeMounts": _mounts(options),
    }
    return spec | {"containers": [own | container], "volumes": _volumes(options)}


def _placing(options: KubernetesOptions) -> Manifest:
    """Say on which nodes pods may run, as whom, and how the image is pulled."""
    spec: Manifest = {}
    if options.node_selector:
        spec["nodeSelector"] = dict(text.split("=", 1) for text in options.node_selector)
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": options.pull_secret}]
    return spec


def _pod_security(options: KubernetesOptions) -> Manifest:
    """Write the pod's security context; with a user of its own it can't be root."""
    context: Manifest = {"seccompProfile": {"type": "RuntimeDefault"}}
    user = options.kubernetes_user
    if user is None:
        return context
    return context | {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",  # don't walk all snapshots each time
    }


def _container_security() -> Manifest:
    """Write the container's security context: no rights beyond those of its user."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _tolerations() -> list[Plain]:
    """Let pods onto GPU nodes, and give up a lost node sooner than after the usual five minutes."""
    listed: list[Plain] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    for what in ("not-ready", "unreachable"):
        lost: Manifest = {"key": f"node.kubernetes.io/{what}", "operator": "Exists"}
        listed.append(lost | {"effect": "NoExecute", "tolerationSeconds": _LOST_NODE_S})
    return listed


def _volumes(options: KubernetesOptions) -> list[Plain]:
    """List the pods' volumes: shared memory, and the claims."""
    memory: Manifest = {"medium": "Memory", "sizeLimit": options.shared_memory}
    listed: list[Plain] = [{"name": _SHARED_MEMORY, "emptyDir": memory}]
    for number, text in enumerate(options.volume):
        claim, _ = split_volume(text)
        listed.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return listed


def _mounts(options: KubernetesOptions) -> list[Plain]:
    """List where the volumes are mounted."""
    listed: list[Plain] = [{"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]
    for number, text in enumerate(options.volume):
        listed.append({"name": f"volume-{number}", "mountPath": split_volume(text)[1]})
    return listed


def resources(job: ClusterJob, options: KubernetesOptions) -> Manifest:
    """Say what a pod needs; limits equal requests, so that a pod isn't the first to be evicted."""
    wanted: Manifest = {}
    if options.node_cpu:
        wanted["cpu"] = options.node_cpu
    if options.node_memory:
        wanted["memory"] = options.node_memory
    if job.gpus_per_node:
        wanted["nvidia.com/gpu"] = job.gpus_per_node
    return {"requests": wanted, "limits": wanted} if wanted else {}


def variables(submission: Submission) -> list[Plain]:
    """List the container's variables."""
    own = {"PYTHONUNBUFFERED": "1"}
    if submission.options.kubernetes_user is not None:
        own["HOME"] = "/tmp"  # the image knows no such user
    return [{"name": n, "value": v} for n, v in own.items()]


def exit_codes() -> Manifest:
    """Write what a Job makes of a pod's end: which failure is final, which isn't counted.

    All other codes, 70 above all, count as failures that are worth another try. A container of a
    peer that is lost ends with 70 as well, so that all pods are started again.
    """
    final = sorted((ExitCode.USAGE, ExitCode.JOB, *_NO_SUCH_PROGRAM))
    return {
        "rules": [
            {"action": "FailJob", "onExitCodes": _codes(*map(int, final))},
            {"action": "Ignore", "onExitCodes": _codes(int(ExitCode.RESUMABLE))},
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
        ]
    }


def required_image(job: ClusterJob) -> str:
    """Give the image.

    Raises:
        UsageError: None was named.
    """
    if job.image is None:
        raise UsageError(
            "--on kubernetes needs --image: an image with PyTorch, Paceline and your code in it"
        )
    return job.image


def _codes(*codes: int) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}
