"""The task file by SkyPilot's published fields, and its command as a script plays it."""

import os
import shlex
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from paceline._version import __version__
from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.follow import launch
from paceline.launch.skypilot.launcher import SkypilotLauncher
from paceline.launch.skypilot.options import SkypilotOptions
from paceline.launch.skypilot.task import task
from tests.launch.cluster_jobs import a_job
from tests.launch.waiting import patient
from tests.support.played import Answer, Played

TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0}


def submit(job: ClusterJob, options: SkypilotOptions) -> int:
    return launch(SkypilotLauncher(options), job)


def closed(**properties: object) -> dict[str, object]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


# Names and types of the fields that we write, from the reference at
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html (SkyPilot 0.14). Others are errors.
TASK = closed(
    name={"type": "string", "pattern": r"^[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*$"},
    num_nodes={"type": "integer", "minimum": 1},
    workdir=TEXT,
    envs={"type": "object", "additionalProperties": TEXT},
    setup=TEXT,
    run=TEXT,
    file_mounts={
        "type": "object",
        "additionalProperties": closed(
            source=TEXT, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}
        ),
    },
    resources=closed(
        infra=TEXT,
        accelerators={"type": "string", "pattern": r"^[\w.-]+:[0-9]+$"},
        cpus=TEXT,
        memory=TEXT,
        image_id=TEXT,
        use_spot={"type": "boolean"},
        autostop=closed(idle_minutes=WHOLE, down={"type": "boolean"}),
        job_recovery=closed(
            max_restarts_on_errors=WHOLE,
            recover_on_exit_codes={"type": "array", "items": WHOLE, "uniqueItems": True},
        ),
    ),
)
EVERYTHING: dict[str, Any] = {
    "cloud": "aws/us-east-1",
    "gpu_type": "A100",
    "cloud_cpus": "8+",
    "cloud_memory": "64",
    "use_spot": True,
    "keep_in": "s3://my-runs",
}


def written(job: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    content = task(a_job(**job), SkypilotOptions(**options), "paceline-digits-1a", "1a")
    jsonschema.validate(content, TASK)
    return content


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"gpu_type": "L4"}])
@pytest.mark.parametrize("job", [{}, {"time_limit_s": 60.0, "image": None, "workers": 2}])
def test_every_field_is_skypilots(job: dict[str, Any], options: dict[str, Any]) -> None:
    assert written(job, options)["num_nodes"] == 2


def test_a_misspelt_field_is_found() -> None:
    content = written({}, {})
    content["resources"]["use_sport"] = True
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, TASK)


def test_machines() -> None:
    wanted = written({"gpus_per_node": 4}, {"gpu_type": "A100", "cloud": "gcp"})["resources"]
    assert wanted == {
        "infra": "gcp",
        "accelerators": "A100:4",
        "image_id": "docker:example.org/team/train:1",
        "autostop": {"idle_minutes": 10, "down": True},  # no bill is left behind
    }
    with pytest.raises(UsageError, match="needs --gpu-type"):
        written({"gpus_per_node": 4}, {})


def test_spot_machines_are_replaced_and_their_snapshots_kept() -> None:
    content = written({"max_restarts": 5}, EVERYTHING)
    assert content["resources"]["job_recovery"] == {
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": [ExitCode.INFRASTRUCTURE, ExitCode.RESUMABLE],
    }
    limited = written({"time_limit_s": 60.0}, EVERYTHING)["resources"]["job_recovery"]
    assert limited["recover_on_exit_codes"] == [ExitCode.INFRASTRUCTURE]
    words = shlex.split(content["run"].splitlines()[0])
    assert words[words.index("--max-restarts") + 1] == "5"
    assert words[-2:] == ["--run-dir", "/paceline-runs/runs/a"]
    assert content["file_mounts"]["/paceline-runs"]["source"] == "s3://my-runs"
    with pytest.raises(UsageError, match="needs --keep-in"):
        SkypilotOptions(use_spot=True)


def test_setup_installs_this_version() -> None:
    assert f"paceline=={__version__}" in written({}, {})["setup"]
    assert written({}, {"sky_setup": "make it"})["setup"] == "make it\n"


@pytest.mark.parametrize("code", [0, 65])
def test_the_script_tells_its_exit_code(code: int, tmp_path: Path) -> None:
    """With a stand-in for Python that ends with the code, in a real shell."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@"\nexit {code}\n')
    python.chmod(0o755)
    odd = "a 'quoted' $HOME `word`"
    command = ("paceline", "train", "digits", "--note", odd)
    script = written({"command": command, "time_limit_s": 60.0}, {})["run"]
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/somewhere"},
        capture_output=True,
        text=True,
        timeout=patient(30),
        check=False,
    )
    assert done.returncode == code
    assert odd in done.stdout.splitlines()
    assert done.stdout.endswith(f"paceline: exit code {code}\n")


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played(tmp_path / "bin", "sky")
    monkeypatch.setenv("PATH", f"{played.directory}:{os.environ['PATH']}")
    return played


@pytest.mark.parametrize(
    ("own", "told", "expected"),
    [
        (0, [70, 0, 0], 0),
        (100, [70, 65], 65),
        (100, [70, 75], 70),
        (100, [75, 75], 75),
        (100, [0], 70),
        (1, [], 70),
        (100, [1], 70),
    ],
)
def test_the_exit_code(own: int, told: list[int], expected: int, sky: Played) -> None:
    text = "".join(f"(head, rank={n}) paceline: exit code {c}\n" for n, c in enumerate(told))
    sky.play({"launch": Answer(text, code=own)})
    assert submit(a_job(), SkypilotOptions()) == expected


def test_it_is_launched_and_its_exit_code_found(
    sky: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "(worker1, rank=1) paceline: exit code 70\n(head, rank=0) paceline: exit code 65\n"
    sky.play({"launch": Answer(text, code=100)})
    assert submit(a_job(), SkypilotOptions()) == ExitCode.JOB
    assert capsys.readouterr().out == text
    ((words, _),) = [(call.words, call.stdin) for call in sky.calls()]
    assert words[:2] == ["launch", "-c"]
    assert words[2].startswith("paceline-digits-")
    assert words[3] == "--yes"
    assert not Path(words[-1]).exists()


def test_spot_is_a_managed_job(sky: Played) -> None:
    sky.play({"jobs launch": Answer()})
    assert submit(a_job(detach=True), SkypilotOptions(**EVERYTHING)) == ExitCode.DONE
    assert "--detach-run" in sky.calls("jobs launch -n")[0].words


def interrupt_once_called(sky: Played) -> threading.Thread:
    def wait() -> None:
        deadline_s = time.monotonic() + patient(30)
        while not sky.calls() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_ctrl_c_cancels_and_says_how_to_go_on(
    sky: Played, capfd: pytest.CaptureFixture[str]
) -> None:
    sky.play({"launch -c": Answer("epoch 1\n", until='"cancel"'), "cancel": Answer("cancelled\n")})
    thread = interrupt_once_called(sky)
    options = SkypilotOptions(keep_in="gs://my-runs")
    assert submit(a_job(), options) == ExitCode.RESUMABLE
    thread.join()
    (cancelled,) = sky.calls("cancel")
    assert cancelled.words[:3] == ["cancel", "--yes", "--all"]
    assert "--resume and --run-dir /paceline-runs/runs/a" in capfd.readouterr().out


def test_a_cancel_that_fails_says_what_may_still_cost(sky: Played) -> None:
    sky.play({"launch -c": Answer("epoch 1\n", until='"cancel"'), "cancel": Answer(code=1)})
    thread = interrupt_once_called(sky)
    with pytest.raises(InfrastructureError, match=r"cost.* sky down paceline-digits-"):
        submit(a_job(), SkypilotOptions())
    thread.join()


def test_a_dry_run_prints_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(a_job(dry_run=True), SkypilotOptions(**EVERYTHING)) == ExitCode.DONE
    jsonschema.validate(yaml.safe_load(capsys.readouterr().out), TASK)


def test_no_sky(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="needs SkyPilot"):
        submit(a_job(), SkypilotOptions())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cloud": "aws; rm"}, "--cloud"),
        ({"gpu_type": "A 100"}, "--gpu-type"),
        ({"cloud_cpus": "many"}, "--cloud-cpus"),
        ({"cloud_memory": "64GB"}, "--cloud-memory"),
        ({"keep_in": "my-runs"}, "--keep-in"),
        ({"idle_minutes": -1}, "--idle-minutes"),
    ],
)
def test_what_skypilot_would_not_take(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SkypilotOptions(**options)
