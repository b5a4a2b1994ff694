"""The batch script, run in a real shell with stand-ins for Slurm's commands."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.launch.slurm import SlurmLauncher, SlurmOptions
from tests.launch.cluster_jobs import a_job
from tests.launch.waiting import patient


def script(asked: SlurmOptions | None = None, **job: Any) -> str:
    launcher = SlurmLauncher(asked or SlurmOptions())
    return launcher.render(a_job(**{"image": None, **job})).files["slurm.sh"]


def directives(text: str) -> list[str]:
    lines = [line.partition(" ") for line in text.splitlines()]
    return [word for head, _, word in lines if head == "#SBATCH"]


def test_what_is_asked_of_slurm() -> None:
    asked = SlurmOptions(partition="gpu", account="vision")
    assert directives(script(asked, gpus_per_node=4, time_limit_s=5430)) == [
        "--job-name=paceline-digits",
        "--partition=gpu",
        "--account=vision",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--gpus-per-node=4",
        "--time=91",
        "--signal=TERM@120",
        "--requeue",
        "--chdir=/nowhere",
        "--output=/nowhere/runs/a/cluster/slurm.log",
        "--open-mode=append",
    ]


def test_a_patch_adds_replaces_and_removes_options() -> None:
    patch = {"constraint": "a100", "exclusive": True, "requeue": None, "signal": "TERM@600"}
    listed = directives(script(patch=patch))
    assert {"--constraint=a100", "--exclusive", "--signal=TERM@600"} <= {*listed}
    assert "--requeue" not in listed
    with pytest.raises(UsageError, match="unprintable"):
        script(patch={"comment": "a\nb"})


def test_an_image_is_the_clusters_own_affair() -> None:
    with pytest.raises(UsageError, match="container-image: x/y"):
        script(image="x/y")


@pytest.mark.parametrize(
    ("code", "restarts", "state", "requeued"),
    [
        (0, 0, "RUNNING", False),
        (2, 0, "RUNNING", False),
        (65, 0, "RUNNING", False),
        (70, 2, "RUNNING", True),
        (70, 3, "RUNNING", False),
        (137, 0, "RUNNING", True),
        (75, 9, "RUNNING", True),
        (75, 0, "COMPLETING", False),  # scancel
    ],
)
def test_when_the_job_is_queued_again(
    code: int, restarts: int, state: str, requeued: bool, tmp_path: Path
) -> None:
    tools = {
        "srun": f'printf "%s\\n" "$@" "${{PACELINE_NODES-unset}}"; exit {code}',
        "squeue": f"echo {state}",
        "scontrol": 'echo "scontrol $*"',
    }
    for name, line in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    odd = "a 'quoted' $HOME `word`"
    variables = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "PACELINE_NODES": "2"}
    done = subprocess.run(
        ["bash", "-c", script(options=("--note", odd))],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=patient(30),
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, "")
    lines = done.stdout.splitlines()
    assert ("scontrol requeue 7" in lines) == requeued
    assert odd in lines
    assert "unset" in lines
    assert lines[lines.index("--resume") + 1 :][:2] == ["--on", "node"]
