"""The commands given to kubectl, which a script plays here: no control plane is at hand."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.launch import follow
from paceline.launch.cluster import ClusterJob
from paceline.launch.follow import launch
from paceline.launch.json_fields import Answer as Json
from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.kubernetes.launcher import KubernetesLauncher
from paceline.launch.kubernetes.options import KubernetesOptions
from paceline.launch.kubernetes.outcome import describe_wait, outcome, read_pods
from tests.launch.cluster_jobs import a_job
from tests.launch.waiting import patient
from tests.support.played import Answer, Played

INDEX = "batch.kubernetes.io/job-completion-index"
OPTIONS = KubernetesOptions(kubernetes_kind="job", volume=("snapshots:/snapshots",))


def submit(job: ClusterJob, options: KubernetesOptions) -> int:
    return launch(KubernetesLauncher(options), job)


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setattr(KubernetesJob, "poll_s", 0.01)
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    played = Played(tmp_path / "bin", "kubectl")
    monkeypatch.setenv("PATH", f"{played.directory}:{os.environ['PATH']}")
    return played


def pod(node: int, state: dict[str, Any], name: str = "", made: int = 0) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name or f"pod-{node}",
            "annotations": {INDEX: str(node)},
            "creationTimestamp": f"2026-11-21T10:00:{made:02}Z",
        },
        "status": {
            "conditions": [],
            "containerStatuses": [{"name": "node", "state": state}],
        },
    }


def exited(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": "Error"}}


RUNNING: dict[str, Any] = {"running": {"startedAt": "2026-11-21T10:00:00Z"}}


def pods(*listed: dict[str, Any]) -> Answer:
    return Answer(json.dumps({"items": listed}))


def job(condition: str = "", **more: str) -> Answer:
    conditions = [{"type": condition, "status": "True", **more}] if condition else []
    described = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"uid": "u-1"},
        "status": {"conditions": conditions},
    }
    return Answer(json.dumps(described))


USUAL = {
    "apply": Answer("created\n"),
    "patch": Answer("patched\n"),
    "get pods": pods(pod(0, RUNNING), pod(1, RUNNING)),
    "logs|--follow": Answer("epoch 1\n"),
}


def test_it_is_applied_followed_and_done(
    kubectl: Played, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    kubectl.play(
        USUAL
        | {
            "get pods": [pods(), pods(pod(0, RUNNING), pod(1, waiting)), USUAL["get pods"]],
            "get job/": [job(), job(), job(), job(), job("Complete")],
        }
    )
    assert submit(a_job(), OPTIONS) == ExitCode.DONE
    out, err = capfd.readouterr()
    assert "epoch 1" in out
    assert "0 of 2 nodes have started" in err
    assert "1 of 2 nodes have started: ImagePullBackOff: no such image" in err
    (applied,) = kubectl.calls("apply")
    assert applied.words == ["apply", "-f", "-"]
    listed = json.loads(applied.stdin)
    assert [item["kind"] for item in listed["items"]] == ["Service", "NetworkPolicy", "Job"]
    name = listed["items"][2]["metadata"]["name"]
    owned = [call.words[1] for call in kubectl.calls("patch")]
    assert owned == [f"service/{name}", f"networkpolicy/{name}"]
    assert '"uid": "u-1"' in kubectl.calls("patch")[0].words[-1]
    assert kubectl.calls("logs")[0].words == ["logs", "--follow", "pod-0"]
    assert kubectl.calls("delete") == []


def test_context_and_namespace_are_named_in_every_call(kubectl: Played) -> None:
    kubectl.play(USUAL | {"get job/": job("Complete")})
    options = KubernetesOptions(
        kubernetes_kind="job", kubernetes_context="east", namespace="team-a"
    )
    assert submit(a_job(), options) == ExitCode.DONE
    calls = kubectl.calls()
    assert len(calls) > 3
    assert all(c.words[:2] == ["--context=east", "--namespace=team-a"] for c in calls)


@pytest.mark.slow
def test_a_restarted_rank_0_is_followed_again(
    kubectl: Played, capfd: pytest.CaptureFixture[str]
) -> None:
    again = [pod(0, exited(70), "first", 1), pod(1, RUNNING), pod(0, RUNNING, "second", 2)]
    kubectl.play(
        {
            "logs|first": Answer("lost a peer\n", until="get"),
            "logs|second": Answer("epoch 2\n"),
        }
        | USUAL
        | {
            "get pods": [pods(pod(0, RUNNING, "first", 1)), pods(*again)],
            "get job/": [*[job()] * 12, job("Complete")],
        }
    )
    assert submit(a_job(), OPTIONS) == ExitCode.DONE
    out = capfd.readouterr().out
    assert 0 <= out.index("lost a peer") < out.index("epoch 2")


@pytest.mark.parametrize(
    ("message", "codes", "reason", "expected"),
    [
        ("Container node for pod x/y failed with exit code 65 matching FailJob", (70, 70), "", 65),
        ("", (70, 65), "PodFailurePolicy", 65),
        ("", (2, 2), "PodFailurePolicy", 2),
        ("too many", (70, 137), "MaxFailedIndexesExceeded", 70),
        ("", (75, 75), "DeadlineExceeded", 75),
    ],
)
def test_the_exit_code_is_the_pods(
    message: str, codes: tuple[int, int], reason: str, expected: int
) -> None:
    listed = read_pods(Json({"items": [pod(n, exited(code)) for n, code in enumerate(codes)]}))
    described = json.loads(job("Failed", reason=reason, message=message).out)
    ended = outcome(Json(described), listed)
    assert ended is not None
    assert ended.code == expected
    assert reason in ended.reason


def test_a_failure_shows_the_node_that_failed(
    kubectl: Played, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = job(
        "Failed", reason="PodFailurePolicy", message="it failed with exit code 65 matching"
    )
    kubectl.play(
        {"logs|--tail": Answer("Traceback of node 1\n")}
        | USUAL
        | {"get pods": pods(pod(0, exited(70)), pod(1, exited(65))), "get job/": failed}
    )
    assert submit(a_job(), OPTIONS) == ExitCode.JOB
    err = capfd.readouterr().err
    assert "--- node 1, pod pod-1:\nTraceback of node 1" in err
    assert "PodFailurePolicy: it failed with exit code 65" in err


def test_detached_it_says_how_to_look(kubectl: Played, capfd: pytest.CaptureFixture[str]) -> None:
    kubectl.play(USUAL | {"get job/": job()})
    assert submit(a_job(detach=True), OPTIONS) == ExitCode.DONE
    out = capfd.readouterr().out
    assert "Stop:    kubectl delete job/paceline-digits-" in out
    assert kubectl.calls("logs") == []


@pytest.fixture
def when() -> Iterator[Callable[[Callable[[], bool], signal.Signals], None]]:
    """Send this process a signal once a condition holds."""
    threads = []

    def later(condition: Callable[[], bool], number: signal.Signals) -> None:
        def wait() -> None:
            deadline_s = time.monotonic() + patient(30)
            while not condition():
                if time.monotonic() > deadline_s:
                    return
                time.sleep(0.01)
            os.kill(os.getpid(), number)

        threads.append(threading.Thread(target=wait))
        threads[-1].start()

    yield later
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_deletes_the_job_and_shows_its_last_words(
    number: signal.Signals,
    kubectl: Played,
    when: Callable[[Callable[[], bool], signal.Signals], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = Answer("epoch 1\n", until='"delete"', then="snapshot written\n")
    kubectl.play(USUAL | {"get job/": job(), "logs|--follow": log, "delete": Answer("deleted\n")})
    when(lambda: bool(kubectl.calls("logs")), number)
    assert submit(a_job(), OPTIONS) == ExitCode.RESUMABLE
    (deleted,) = kubectl.calls("delete")
    assert {"--cascade=foreground", "--wait"} <= set(deleted.words)
    out = capfd.readouterr().out
    assert out.index("epoch 1") < out.index("snapshot written") < out.index("--resume")
    assert "--run-dir /snapshots/runs/a" in out


def test_a_job_that_cannot_be_deleted_may_still_run(
    kubectl: Played, when: Callable[[Callable[[], bool], signal.Signals], None]
) -> None:
    kubectl.play(USUAL | {"get job/": job(), "delete": Answer(err="forbidden\n", code=1)})
    when(lambda: bool(kubectl.calls("logs")), signal.SIGINT)
    with pytest.raises(
        InfrastructureError, match=r"may still run, and cost\. Look, .*: kubectl delete job/"
    ):
        submit(a_job(), OPTIONS)


def test_what_was_applied_in_part_is_taken_back(kubectl: Played) -> None:
    refused = Answer(err='E1121 memcache.go] "x"\nerror: jobs.batch is forbidden\n', code=1)
    kubectl.play({"apply": refused, "delete": Answer()})
    with pytest.raises(InfrastructureError, match=r"apply failed: error: jobs\.batch is forbidden"):
        submit(a_job(), OPTIONS)
    (deleted,) = kubectl.calls("delete")
    kinds = [word.partition("/")[0] for word in deleted.words[1:4]]
    assert kinds == ["job", "networkpolicy", "service"]


def test_without_the_right_to_patch_it_trains_and_says_what_stays(
    kubectl: Played, capfd: pytest.CaptureFixture[str]
) -> None:
    forbidden = Answer(err="forbidden\n", code=1)
    kubectl.play(USUAL | {"get job/": job("Complete"), "patch": forbidden})
    assert submit(a_job(), OPTIONS) == ExitCode.DONE
    assert "remove them by: kubectl delete service,networkpolicy" in capfd.readouterr().err


def test_a_job_that_is_gone(kubectl: Played) -> None:
    gone = Answer(err='Error from server (NotFound): jobs.batch "x" not found\n', code=1)
    kubectl.play(USUAL | {"get job/": [job(), job(), gone]})
    with pytest.raises(InfrastructureError, match="somebody has deleted it"):
        submit(a_job(), OPTIONS)


def test_a_cluster_that_does_not_answer_for_a_while(kubectl: Played) -> None:
    refused = Answer(err="connection refused\n", code=1)
    kubectl.play(USUAL | {"get job/": [job(), refused, refused, job("Complete")]})
    assert submit(a_job(), OPTIONS) == ExitCode.DONE
    assert len(kubectl.calls("get job/")) == 4


@pytest.mark.parametrize(("listed", "kind"), [("trainjobs.trainer.x\n", "TrainJob"), ("", "Job")])
def test_the_cluster_is_asked_for_kubeflow(listed: str, kind: str, kubectl: Played) -> None:
    kubectl.play(
        USUAL
        | {
            "api-resources": Answer(listed),
            "get job/": job("Complete"),
            "get trainjob/": job("Complete"),
        }
    )
    assert submit(a_job(), KubernetesOptions()) == ExitCode.DONE
    (applied,) = kubectl.calls("apply")
    assert json.loads(applied.stdin)["items"][-1]["kind"] == kind


def test_no_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="needs kubectl"):
        submit(a_job(), OPTIONS)


def test_why_nodes_wait() -> None:
    unplaced = pod(1, {})
    unplaced["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient gpu"}
    ]
    starting = pod(0, {"waiting": {"reason": "ContainerCreating"}})
    listed = read_pods(Json({"items": [starting, unplaced]}))
    assert describe_wait(listed, 2) == "0 of 2 nodes have started: 0/3 nodes: Insufficient gpu"
    assert describe_wait(read_pods(Json({"items": [pod(0, RUNNING)]})), 1) == ""
