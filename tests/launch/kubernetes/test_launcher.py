"""Manifests against the published schemas: Kubernetes' own, and Kubeflow Trainer's models."""

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubeflow_trainer_api.models.trainer_v1alpha1_training_runtime import (
    TrainerV1alpha1TrainingRuntime,
)

from paceline.errors import ExitCode, UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.follow import launch
from paceline.launch.kubernetes.launcher import KubernetesLauncher, manifests
from paceline.launch.kubernetes.options import KubernetesOptions
from paceline.launch.kubernetes.pods import Submission
from tests.launch.cluster_jobs import a_job

MODELS = {"TrainJob": TrainerV1alpha1TrainJob, "TrainingRuntime": TrainerV1alpha1TrainingRuntime}
VERSIONS = ("1.31", "1.33", "1.37")
"""Older ones lack fields that the Job needs."""
EVERYTHING: dict[str, Any] = {
    "namespace": "team-a",
    "volume": ("snapshots:/snapshots", "data:/data"),
    "node_cpu": "8",
    "node_memory": "64Gi",
    "node_selector": ("gpu=a100", "zone="),
    "kubernetes_user": 1000,
    "service_account": "trainer",
    "pull_secret": "registry",
}
ASKED: dict[str, Any] = {
    "gpus_per_node": 4,
    "time_limit_s": 3600.0,
}


def submit(job: ClusterJob, options: KubernetesOptions) -> int:
    return launch(KubernetesLauncher(options), job)


def written(kind: str, job: dict[str, Any], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Give the manifests by their kind, as the cluster reads them."""
    submission = Submission(
        job=a_job(**job), options=KubernetesOptions(**options), name="paceline-digits-1a", id="1a"
    )
    text = json.dumps(manifests(submission, kind))
    return {manifest["kind"]: manifest for manifest in json.loads(text)}


def check(manifest: dict[str, Any]) -> None:
    """Hold a manifest against its schema; a field that isn't in it is an error."""
    model = MODELS.get(manifest["kind"])
    if model is None:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    read = model.from_dict(manifest)
    assert read is not None
    assert read.to_dict() == manifest


@pytest.mark.parametrize("kind", ["job", "trainjob"])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("job", [{}, ASKED, {"workers": 2}], ids=["plain", "gpus", "workers"])
@pytest.mark.core_cases(2)
def test_the_schemas_know_every_field(
    kind: str, job: dict[str, Any], options: dict[str, Any]
) -> None:
    for manifest in written(kind, job, options).values():
        check(manifest)


def test_a_clusters_runtime_is_patched_as_its_schema_allows() -> None:
    options = EVERYTHING | {"kubernetes_runtime": "torch-distributed"}
    made = written("trainjob", ASKED, options)
    assert made.keys() == {"NetworkPolicy", "TrainJob"}
    check(made["TrainJob"])
    spec = made["TrainJob"]["spec"]
    assert spec["runtimeRef"]["kind"] == "ClusterTrainingRuntime"
    assert spec["runtimeRef"]["name"] == "torch-distributed"
    jobs = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pods = jobs[0]["template"]["spec"]["template"]["spec"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in pods["containers"][0][
        "volumeMounts"
    ]


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("Job", ["spec", "backofLimit"]),
        ("Service", ["spec", "publishNotReady"]),
        ("NetworkPolicy", ["spec", "igress"]),
        ("TrainJob", ["spec", "trainer", "numNode"]),
        ("TrainingRuntime", ["spec", "template", "spec", "failurePolicy", "maxRestart"]),
    ],
)
def test_a_misspelt_field_is_found(kind: str, where: list[str]) -> None:
    made = written("job", {}, {}) | written("trainjob", {}, {})
    inner = made[kind]
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = 2
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check(made[kind])


def pods_of(kind: str, **options: Any) -> dict[str, Any]:
    made = written(kind, ASKED, EVERYTHING | options)
    if kind == "job":
        spec: dict[str, Any] = made["Job"]["spec"]["template"]["spec"]
        return spec
    jobs = made["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    found: dict[str, Any] = jobs[0]["template"]["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_pods_have_no_rights_and_time_to_stop(kind: str) -> None:
    pods = pods_of(kind)
    (container,) = pods["containers"]
    assert pods["automountServiceAccountToken"] is False
    assert pods["terminationGracePeriodSeconds"] == 120
    assert pods["restartPolicy"] == "Never"
    assert pods["securityContext"] == {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pods["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounted == {
        "shared-memory": "/dev/shm",
        "volume-0": "/snapshots",
        "volume-1": "/data",
    }


def test_without_a_user_the_image_decides() -> None:
    assert "runAsNonRoot" not in pods_of("job", kubernetes_user=None)["securityContext"]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_every_exit_code_has_its_consequence(kind: str) -> None:
    made = written(kind, ASKED, {})
    if kind == "job":
        policy = made["Job"]["spec"]["podFailurePolicy"]
    else:
        jobs = made["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        policy = jobs[0]["template"]["spec"]["podFailurePolicy"]
    assert {code: consequence(policy, code, disrupted=False) for code in ExitCode if code} == {
        ExitCode.USAGE: "FailJob",
        ExitCode.JOB: "FailJob",
        ExitCode.INFRASTRUCTURE: "Count",
        ExitCode.RESUMABLE: "Ignore",
    }
    assert consequence(policy, 143, disrupted=True) == "Ignore"
    assert consequence(policy, 137, disrupted=False) == "Count"
    assert consequence(policy, 127, disrupted=False) == "FailJob"


def consequence(policy: dict[str, Any], code: int, *, disrupted: bool) -> str:
    """Apply a policy as the Job controller does: the first rule that fits counts."""
    for rule in policy["rules"]:
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
        if codes is not None and code in codes["values"]:
            return str(rule["action"])
        if conditions is not None and disrupted:
            return str(rule["action"])
    return "Count"


def test_all_workers_are_started_again_together() -> None:
    job = written("job", {"max_restarts": 5, "nodes": 8}, {})["Job"]["spec"]
    assert (job["completions"], job["parallelism"]) == (8, 8)
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (5, 0)
    assert "backoffLimit" not in job
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    runtime = written("trainjob", {"max_restarts": 5}, {})["TrainingRuntime"]
    jobs = runtime["spec"]["template"]["spec"]
    assert jobs["failurePolicy"]["maxRestarts"] == 5
    assert jobs["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert jobs["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0


def test_only_the_jobs_own_pods_may_connect() -> None:
    for kind in ("job", "trainjob"):
        made = written(kind, {}, {})
        policy = made["NetworkPolicy"]["spec"]
        assert policy["policyTypes"] == ["Ingress"]
        assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
        assert policy["podSelector"]["matchLabels"]
    job = written("job", {}, {})
    labels = job["Job"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        job["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        job["Service"]["spec"]["selector"],
    ):
        assert selector.items() <= labels.items()
    assert "NetworkPolicy" not in written("job", {}, {"network_policy": False})


def test_nodes_are_told_their_place() -> None:
    made = written("job", {"gpus_per_node": 4}, {"volume": ("snapshots:/snapshots",)})
    (container,) = made["Job"]["spec"]["template"]["spec"]["containers"]
    told = {v["name"]: v.get("value") for v in container["env"]}
    assert told["PET_NNODES"] == "2"
    assert told["PET_NPROC_PER_NODE"] == "4"
    assert told["PET_MASTER_ADDR"] == "paceline-digits-1a-0.paceline-digits-1a"
    assert (
        made["Job"]["spec"]["template"]["spec"]["subdomain"] == made["Service"]["metadata"]["name"]
    )
    assert made["Service"]["spec"]["publishNotReadyAddresses"] is True
    assert container["command"][-2:] == ["--run-dir", "/snapshots/runs/a"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    trainer = written("trainjob", {"gpus_per_node": 4}, {})["TrainJob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)


def test_a_dry_run_prints_what_kubectl_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(a_job(dry_run=True), KubernetesOptions()) == ExitCode.DONE
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]
    assert kinds == ["Service", "NetworkPolicy", "Job"]
    options = KubernetesOptions(kubernetes_kind="trainjob")
    assert submit(a_job(dry_run=True), options) == ExitCode.DONE
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [document["kind"] for document in documents] == [
        "NetworkPolicy",
        "TrainingRuntime",
        "TrainJob",
    ]
    for document in documents:
        check(document)


def test_the_image_must_be_named() -> None:
    with pytest.raises(UsageError, match="needs --image"):
        submit(a_job(image=None, dry_run=True), KubernetesOptions())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"volume": ("snapshots",)}, "CLAIM:PATH"),
        ({"volume": ("s:relative",)}, "CLAIM:PATH"),
        ({"volume": ("s:/a/../b",)}, "CLAIM:PATH"),
        ({"volume": ("s:/",)}, "CLAIM:PATH"),
        ({"volume": ("s:/a", "t:/a")}, "at once"),
        ({"volume": ("s:/dev/shm",)}, "at once"),
        ({"namespace": "Team"}, "--namespace"),
        ({"namespace": "-x"}, "--namespace"),
        ({"shared_memory": "lots"}, "--shared-memory"),
        ({"node_selector": ("gpu",)}, "KEY=VALUE"),
        ({"kubernetes_user": 0}, "--kubernetes-user"),
        ({"grace_s": 1}, "--grace-s"),
        ({"kubernetes_runtime": "x", "kubernetes_kind": "job"}, "TrainJob"),
    ],
)
def test_what_kubernetes_would_not_take(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        KubernetesOptions(**options)
