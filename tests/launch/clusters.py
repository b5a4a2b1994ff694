"""Stand-ins for each cluster, which a launcher drives in the table of test_launchers.py."""

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import ExitCode
from paceline.launch.kubernetes.job import KubernetesJob
from paceline.launch.sagemaker.job import SagemakerJob
from paceline.launch.slurm import job as slurm_job
from tests.launch.kubernetes.test_job import RUNNING, USUAL, exited, pod, pods
from tests.launch.kubernetes.test_job import job as kubernetes_answer
from tests.launch.sagemaker.server import NAME, served_job, state
from tests.support.played import Answer, Played

RUN_DIR = "runs/a"


class Cluster(ABC):
    """A cluster that plays one job."""

    options: Mapping[str, Any] = {}
    """Of the launcher."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.monkeypatch = monkeypatch
        self.programs = directory / "bin"
        monkeypatch.setenv("PATH", f"{self.programs}:{os.environ['PATH']}")

    @abstractmethod
    def play(self, output: str, code: int | None, *, detached: bool = False) -> None:
        """Have the job print so much, and end with a code; None: it runs until it is stopped.

        Detached, SkyPilot's command ends once the task is submitted.
        """

    @abstractmethod
    def has_job(self) -> bool:
        """Whether a job was handed over and runs."""

    @abstractmethod
    def was_stopped(self) -> bool:
        """Whether the cluster was asked to end it."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have the cluster up for the block."""
        yield


class Kubernetes(Cluster):
    options: Mapping[str, Any] = {"kubernetes_kind": "job", "volume": ("snapshots:/snapshots",)}

    @contextmanager
    def running(self) -> Iterator[None]:
        self.monkeypatch.setattr(KubernetesJob, "poll_s", 0.01)
        self.kubectl = Played(self.programs, "kubectl")
        yield

    def play(self, output: str, code: int | None, *, detached: bool = False) -> None:
        answers: dict[str, Any] = {"logs|--follow": Answer(output, until='"delete"')}
        if code is None:
            answers |= {"get job/": kubernetes_answer(), "delete": Answer("deleted\n")}
        else:
            answers["logs|--follow"] = Answer(output)
            answers["get job/"] = kubernetes_answer("Complete")
            if code:
                answers["get pods"] = pods(pod(0, exited(code)), pod(1, RUNNING))
                answers["get job/"] = kubernetes_answer("Failed", reason="PodFailurePolicy")
        self.kubectl.play(USUAL | answers)

    def has_job(self) -> bool:
        return bool(self.kubectl.calls("logs"))

    def was_stopped(self) -> bool:
        return bool(self.kubectl.calls("delete"))


class Skypilot(Cluster):
    options: Mapping[str, Any] = {"keep_in": "s3://my-runs"}

    @contextmanager
    def running(self) -> Iterator[None]:
        self.sky = Played(self.programs, "sky")
        yield

    def play(self, output: str, code: int | None, *, detached: bool = False) -> None:
        launched = Answer(output, until='"cancel"')
        if code is not None:
            text = f"{output}(head, rank=0) paceline: exit code {code}\n"
            launched = Answer(text, code=100 if code else 0)
        elif detached:
            launched = Answer(output)
        self.sky.play({"launch -c": launched, "cancel": Answer()})

    def has_job(self) -> bool:
        return bool(self.sky.calls("launch"))

    def was_stopped(self) -> bool:
        return bool(self.sky.calls("cancel"))


class Sagemaker(Cluster):
    options: Mapping[str, Any] = {
        "instance_type": "ml.g5.12xlarge",
        "role": "arn:aws:iam::123456789012:role/training",
        "s3_output": "s3://my-bucket/paceline",
    }

    @contextmanager
    def running(self) -> Iterator[None]:
        self.monkeypatch.setattr(SagemakerJob, "poll_s", 0.02)
        with served_job(self.directory, self.monkeypatch) as self.server:
            yield

    def play(self, output: str, code: int | None, *, detached: bool = False) -> None:
        events = [{"message": line} for line in output.splitlines()]
        stream = {"logStreamName": f"{NAME}/algo-1-1790000000"}
        ended = state("Completed")
        if code:
            ended = state("Failed", reason=f"AlgorithmError: , exit code: {code}")

        def describe(before: int) -> tuple[int, Mapping[str, Any]]:
            if code is None:
                return 200, state("Stopped" if self.was_stopped() else "InProgress")
            return 200, ended

        def lines(before: int) -> tuple[int, Mapping[str, Any]]:
            return 200, {"events": [] if before else events, "nextForwardToken": "t1"}

        self.server.answers |= {
            "DescribeTrainingJob": describe,
            "DescribeLogStreams": lambda _: (200, {"logStreams": [stream]}),
            "GetLogEvents": lines,
            "StopTrainingJob": lambda _: (200, {}),
        }

    def has_job(self) -> bool:
        return self.server.count("GetLogEvents") > 0

    def was_stopped(self) -> bool:
        return self.server.count("StopTrainingJob") > 0


class Slurm(Cluster):
    @contextmanager
    def running(self) -> Iterator[None]:
        self.monkeypatch.setattr(slurm_job, "_QUERY_S", (0.0, 0.0))
        self.monkeypatch.setattr(slurm_job, "_SETTLE_S", 0.0)
        self.programs.mkdir()
        yield

    def play(self, output: str, code: int | None, *, detached: bool = False) -> None:
        here, run = self.directory, self.directory / RUN_DIR / "slurm"
        end = f"""echo '{{"code": %s, "restarts": 0}}' > {run}/job-7.ended.json"""
        self._put("sbatch", f"printf '{output}' > {run}/job-7.log", "echo 7")
        self._put(
            "scontrol",
            f"echo scontrol $* >> {here}/asked",
            f"if [ -e {run}/job-7.ended.json ]; then echo JobState=COMPLETED; exit; fi",
            "" if code is None else end % code,
            "echo JobState=RUNNING Requeue=1",
        )
        self._put("squeue", "echo 7.0")
        stopped = end % int(ExitCode.RESUMABLE)
        self._put("scancel", f"echo scancel $* >> {here}/asked", stopped)

    def has_job(self) -> bool:
        return (self.directory / "asked").exists()

    def was_stopped(self) -> bool:
        asked = self.directory / "asked"
        return asked.exists() and "scancel --signal=TERM 7" in asked.read_text()

    def _put(self, name: str, *lines: str) -> None:
        (self.programs / name).write_text("\n".join(("#!/bin/sh", *lines, "")))
        (self.programs / name).chmod(0o755)


class Parallel(Cluster):
    """Of the package in plugin/: real processes, of a program in Python's place."""

    @contextmanager
    def running(self) -> Iterator[None]:
        self.programs.mkdir()
        self.options = {"parallel_python": str(self.programs / "python")}
        yield
        for process in psutil.process_iter(["cmdline"]):
            if str(self.programs / "python") in (process.info["cmdline"] or ()):
                process.send_signal(signal.SIGTERM)
                process.wait()

    def play(self, output: str, code: int | None, *, detached: bool = False) -> None:
        here = self.directory
        wait = "while :; do sleep 0.02; done" if code is None else f"exit {code}"
        lines = (
            "#!/bin/sh",
            f"trap 'touch {here}/stopped; exit {int(ExitCode.RESUMABLE)}' TERM",
            f"printf '{output}'",
            f"touch {here}/started",
            wait,
        )
        (self.programs / "python").write_text("\n".join((*lines, "")))
        (self.programs / "python").chmod(0o755)

    def has_job(self) -> bool:
        return (self.directory / "started").exists()

    def was_stopped(self) -> bool:
        return (self.directory / "stopped").exists()


CLUSTERS: Mapping[str, type[Cluster]] = {
    "slurm": Slurm,
    "kubernetes": Kubernetes,
    "skypilot": Skypilot,
    "sagemaker": Sagemaker,
    "parallel": Parallel,
}
