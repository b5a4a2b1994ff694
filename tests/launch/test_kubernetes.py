"""Manifests against the published schemas: Kubernetes' own, and Kubeflow Trainer's model."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from paceline.errors import ExitCode, UsageError
from paceline.launch.cluster import NoOptions
from paceline.launch.kubernetes import KubernetesLauncher
from tests.launch.cluster_jobs import a_job

VERSIONS = ("1.31", "1.33", "1.37")
"""Older ones lack fields that the Job needs."""
VOLUME = {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
MOUNT = {"name": "runs", "mountPath": "/runs"}
POD = {"volumes": [VOLUME], "containers": [{"name": "node", "volumeMounts": [MOUNT]}]}
PATCHES: dict[str, dict[str, Any]] = {
    "Job": {"spec": {"template": {"spec": POD}}},
    "TrainJob": {
        "kind": "TrainJob",
        "spec": {
            "runtimeRef": {"name": "team"},
            "runtimePatches": [
                {
                    "manager": "team",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {
                                        "name": "node",
                                        "template": {"spec": {"template": {"spec": POD}}},
                                    }
                                ]
                            }
                        }
                    },
                }
            ],
        },
    },
}
GPUS = {"gpus_per_node": 4, "time_limit_s": 3600}


def written(kind: str, **job: Any) -> dict[str, dict[str, Any]]:
    """Return the manifests by their kind, as the cluster reads them."""
    patch = PATCHES[kind] if job.pop("patched", False) else {"kind": kind}
    rendered = KubernetesLauncher(NoOptions()).render(a_job(patch=patch, **job))
    (text,) = rendered.files.values()
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def check(manifest: dict[str, Any]) -> None:
    """Hold a manifest against its schema; a field that isn't in it is an error."""
    if manifest["kind"] == "TrainJob":
        read = TrainerV1alpha1TrainJob.from_dict(manifest)
        assert read is not None
        assert read.to_dict() == manifest
        return
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("kind", PATCHES)
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("job", [{}, GPUS, {"workers": 2}], ids=["plain", "gpus", "workers"])
@pytest.mark.core_cases(2)
def test_the_schemas_know_every_field(kind: str, patched: bool, job: dict[str, Any]) -> None:
    made = written(kind, patched=patched, **job)
    assert list(made) == (["TrainJob"] if kind == "TrainJob" else ["Service", "Job"])
    for manifest in made.values():
        check(manifest)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("Job", ["spec", "backofLimit"]),
        ("Service", ["spec", "publishNotReady"]),
        ("TrainJob", ["spec", "trainer", "numNode"]),
    ],
)
def test_a_misspelt_field_is_found(kind: str, where: list[str]) -> None:
    made = written("Job") | written("TrainJob")
    inner = made[kind]
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = 2
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check(made[kind])


def test_a_patch_adds_a_volume_beside_the_shared_memory() -> None:
    pods = written("Job", patched=True)["Job"]["spec"]["template"]["spec"]
    assert [volume["name"] for volume in pods["volumes"]] == ["shared-memory", "runs"]
    (container,) = pods["containers"]
    assert [m["mountPath"] for m in container["volumeMounts"]] == ["/dev/shm", "/runs"]


def test_a_name_of_the_patch_is_that_of_the_service_and_of_rank_0() -> None:
    patch = {"metadata": {"name": "mine"}}
    rendered = KubernetesLauncher(NoOptions()).render(a_job(patch=patch))
    (text,) = rendered.files.values()
    assert [manifest["metadata"]["name"] for manifest in yaml.safe_load_all(text)] == ["mine"] * 2
    assert "mine-0.mine" in text
    assert "=mine," in rendered.follow


def test_every_exit_code_has_its_consequence() -> None:
    policy = written("Job")["Job"]["spec"]["podFailurePolicy"]
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


def test_all_pods_are_started_again_together() -> None:
    job = written("Job", max_restarts=5, nodes=8)["Job"]["spec"]
    assert (job["completions"], job["parallelism"]) == (8, 8)
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (5, 0)
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


def test_nodes_know_their_place() -> None:
    made = written("Job", **GPUS)
    name, pods = made["Job"]["metadata"]["name"], made["Job"]["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    variables = {v["name"]: v.get("value") for v in container["env"]}
    assert variables["PET_NNODES"] == "2"
    assert variables["PET_NPROC_PER_NODE"] == "4"
    assert variables["PET_MASTER_ADDR"] == f"{name}-0.{name}"
    assert pods["subdomain"] == made["Service"]["metadata"]["name"]
    assert made["Service"]["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert container["command"][-3:] == ["--run-dir", "runs/a", "--resume"]
    trainer = written("TrainJob", **GPUS)["TrainJob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)


def test_the_image_must_be_named() -> None:
    with pytest.raises(UsageError, match="needs --image"):
        written("Job", image=None)
