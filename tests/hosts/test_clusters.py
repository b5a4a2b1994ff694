"""What clusters start on their nodes, run on hosts as they start it; restarts by their rules."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ExitCode
from paceline.launch.kubernetes import indexed_job
from paceline.launch.sagemaker import CHECKPOINTS, SagemakerOptions, create_training_job
from paceline.results.run_directory import RunDirectory
from tests.hosts.conftest import MakeRig
from tests.hosts.rig import Rig
from tests.launch.cluster_jobs import a_job
from tests.launch.waiting import patient, until
from tests.support import standin

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("hosts")]

ROOT = Path(__file__).resolve().parents[2]
COMMON = ("--threads", "1", "--global-batch", "64", "--shards", "4", "--device", "cpu")
LONG = ("--epochs", "6", "--snapshot-every-steps", "10", *COMMON)
_LIMIT_S = 120.0


def weights(run: Path) -> object:
    return json.loads((run / "summary.json").read_text())["weights_sha256"]


def alone(directory: Path, *options: str) -> object:
    """Train in one process. Returns the hash of the weights."""
    words = ["train", "digits", *options, "--on", "here", "--run-dir", str(directory / "alone")]
    subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        check=True,
        capture_output=True,
        timeout=patient(_LIMIT_S),
        cwd=directory,
    )
    return weights(directory / "alone")


class Pods:
    """The pods of a Job, each on a host of its own.

    A host's name stands for a pod's, and this Python for the image's; the rest is the manifest's.
    """

    def __init__(self, rig: Rig, job: Mapping[str, Any], nodes: int) -> None:
        self._rig, self._nodes = rig, nodes
        (self._container,) = job["spec"]["template"]["spec"]["containers"]
        self.running: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        self.running = [self._start(n) for n in range(self._nodes)]

    def codes(self) -> list[int]:
        for process in self.running:
            process.communicate(timeout=patient(_LIMIT_S))
        return [process.returncode for process in self.running]

    def _start(self, node: int) -> "subprocess.Popen[str]":
        told = {v["name"]: v.get("value", str(node)) for v in self._container["env"]}
        told["PET_MASTER_ADDR"] = self._rig.host(0).name
        words = self._container["command"]
        return self._rig.host(node).popen([sys.executable, *words[1:]], env=told)


def test_pods_that_the_job_starts_again_go_on_together(make_rig: MakeRig, tmp_path: Path) -> None:
    expected = alone(tmp_path, *LONG)
    rig = make_rig(2)
    volume = tmp_path / "volume"
    written = indexed_job(a_job(options=LONG, run_dir=str(volume / "runs" / "a")), "digits-1a")
    pods = Pods(rig, json.loads(json.dumps(written)), 2)
    run = RunDirectory.named(volume / "runs" / "a")
    pods.start()
    until(lambda: run.newest_step() > 0)
    rig.host(1).signal_all(9)
    codes = pods.codes()
    assert codes[0] == ExitCode.INFRASTRUCTURE  # it lost its peer: counted, and started again
    assert codes[1] not in (0, ExitCode.USAGE, ExitCode.JOB)
    first = run.newest_step()
    pods.start()
    until(lambda: run.newest_step() > first)
    for process in pods.running:  # as when the pods are evicted
        process.terminate()
    assert pods.codes() == [ExitCode.RESUMABLE] * 2
    pods.start()
    assert pods.codes() == [0, 0]
    assert weights(run.path) == expected
    placement = json.loads(run.run_json.read_text())["placement"]
    assert (placement["source"], placement["nodes"]) == ("torch", 2)  # the node's agent started it


def test_sagemakers_containers(make_rig: MakeRig, tmp_path: Path) -> None:
    """With the files that SageMaker makes, and a stand-in for its backend."""
    rig = make_rig(2)
    options = SagemakerOptions(instance_type="ml.p4d.24xlarge", role="r", s3_output="s3://b")
    training = ("--epochs", "2", *COMMON[:4], "--device", "cpu", "--backend", "smddp")
    asked: Any = create_training_job(a_job(options=training), options)
    package = standin.install(tmp_path / "smddp")
    started = []
    for n in range(2):
        opt = tmp_path / f"opt-{n}"
        put_input(opt / "ml" / "input" / "config", rig, n)
        mounted = rig.host(n).run(["mount", "--bind", opt, "/opt"])
        assert mounted.returncode == 0, mounted.stderr
        words = asked["AlgorithmSpecification"]["ContainerEntrypoint"]
        path = {"PYTHONPATH": f"{package}:{ROOT}"}
        started.append(rig.host(n).popen([sys.executable, *words[1:]], env=path))
    said = [process.communicate(timeout=patient(_LIMIT_S))[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    run = tmp_path / "opt-0" / Path(CHECKPOINTS).relative_to("/opt") / "a"
    placement = json.loads((run / "run.json").read_text())["placement"]
    assert (placement["source"], placement["nodes"]) == ("torch", 2)
    assert placement["backend"] == "smddp"
    assert {worker["interface"] for worker in placement["workers"]} == {"eth0"}


def put_input(config: Path, rig: Rig, node: int) -> None:
    """Write what a container finds in /opt/ml/input/config."""
    config.mkdir(parents=True)
    hosts = [rig.host(n).name for n in range(2)]
    described = {"current_host": hosts[node], "hosts": hosts, "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(described))
