"""Options of `--on kubernetes`: where in the cluster, and what each node's pod gets."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from paceline.errors import UsageError

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?")
_SELECTOR = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*=[A-Za-z0-9_.-]*")
_MIN_GRACE_S = 10


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Where in a Kubernetes cluster a training runs, and with what."""

    namespace: str | None = None
    """Namespace to run in. Default: that of kubectl's context."""

    kubernetes_context: str | None = None
    """kubectl's context: which cluster, as whom. Default: its current one."""

    kubernetes_kind: Literal["auto", "trainjob", "job"] = "auto"
    """What to make: Kubeflow Trainer's TrainJob, or a plain Job with a Service. auto asks the
    cluster whether it has Kubeflow; with --dry-run it is a Job."""

    kubernetes_runtime: str | None = None
    """A ClusterTrainingRuntime of the cluster for the TrainJob, such as torch-distributed. Default:
    a runtime of the job's own, made beside it: only so are the exit codes understood."""

    volume: tuple[str, ...] = ()
    """Persistent volume claim and where to mount it, such as snapshots:/snapshots. Repeat it for
    more; the run directory lies on the first. Several nodes need ReadWriteMany."""

    shared_memory: str = "8Gi"
    """Most that a pod may keep in /dev/shm, where the loaders' workers hand over batches."""

    node_cpu: str | None = None
    """CPU cores for each pod, such as 8. Default: what the cluster gives."""

    node_memory: str | None = None
    """Memory for each pod, such as 64Gi; /dev/shm counts. Default: what the cluster gives."""

    node_selector: tuple[str, ...] = ()
    """A label that nodes must have, such as gpu=a100. Repeat it for more."""

    kubernetes_user: int | None = None
    """User (and group) id to run as, not root; volumes become its group's. Default: the image's
    own user."""

    service_account: str | None = None
    """Service account of the pods. Its token isn't mounted. Default: the namespace's own."""

    pull_secret: str | None = None
    """Secret of the namespace with which the image is pulled."""

    network_policy: bool = True
    """Let only the job's own pods connect to its pods. Needs a network plugin that heeds it."""

    grace_s: int = 120
    """Seconds that a pod gets to write its snapshot, when it is told to stop."""

    def __post_init__(self) -> None:
        """Check what can be checked without the cluster.

        Raises:
            UsageError: A value is of no form that Kubernetes takes.
        """
        # The forms that Kubernetes takes for names and quantities.
        _check("--namespace", self.namespace, _LABEL, "lowercase letters, digits and hyphens")
        for flag, name in (
            ("--kubernetes-runtime", self.kubernetes_runtime),
            ("--service-account", self.service_account),
            ("--pull-secret", self.pull_secret),
        ):
            _check(flag, name, _NAME, "lowercase letters, digits, hyphens and dots")
        for flag, amount in (
            ("--shared-memory", self.shared_memory),
            ("--node-cpu", self.node_cpu),
            ("--node-memory", self.node_memory),
        ):
            _check(flag, amount, _QUANTITY, "a number with a unit, such as 64Gi")
        for selector in self.node_selector:
            _check("--node-selector", selector, _SELECTOR, "KEY=VALUE")
        _check_paths(self.volume)
        # Ranges, and options that exclude each other.
        if self.kubernetes_user is not None and self.kubernetes_user < 1:
            raise UsageError(f"--kubernetes-user is {self.kubernetes_user}: give an id from 1 on")
        if self.grace_s < _MIN_GRACE_S:
            raise UsageError(f"--grace-s is {self.grace_s}; it must be at least {_MIN_GRACE_S}")
        if self.kubernetes_runtime is not None and self.kubernetes_kind == "job":
            raise UsageError("--kubernetes-runtime is of a TrainJob: leave out --kubernetes-kind")


def split_volume(text: str) -> tuple[str, str]:
    """Split `CLAIM:PATH`.

    Raises:
        UsageError: It has another form, or the path can't be mounted at.
    """
    claim, _, path = text.partition(":")
    plain = PurePosixPath(path)
    if (
        not _NAME.fullmatch(claim)
        or not plain.is_absolute()
        or ".." in plain.parts
        or len(plain.parts) < 2
        or ":" in path
    ):
        raise UsageError(f"--volume {text!r}: write CLAIM:PATH, such as snapshots:/snapshots")
    return claim, str(plain)


def _check_paths(volumes: tuple[str, ...]) -> None:
    paths = [split_volume(text)[1] for text in volumes]
    for path in paths:
        if paths.count(path) > 1 or path == "/dev/shm":
            raise UsageError(f"--volume: {path} can be mounted at once only")


def _check(flag: str, value: str | None, form: re.Pattern[str], wanted: str) -> None:
    if value is not None and not form.fullmatch(value):
        raise UsageError(f"{flag} {value!r}: write {wanted}")
