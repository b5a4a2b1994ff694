"""The task file by SkyPilot's published fields, and its script in a real shell."""

import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from paceline.errors import UsageError
from paceline.launch.cluster import NoOptions
from paceline.launch.skypilot import SkypilotLauncher
from tests.launch.cluster_jobs import a_job
from tests.launch.waiting import patient

TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0}


def closed(**properties: object) -> dict[str, object]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


# Names and types of the fields that we write, from the reference at
# https://docs.skypilot.co/en/latest/reference/yaml-spec.html (SkyPilot 0.14). Others are errors.
TASK = closed(
    name={"type": "string", "pattern": r"^[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*$"},
    num_nodes={"type": "integer", "minimum": 1},
    workdir=TEXT,
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
        image_id=TEXT,
        use_spot={"type": "boolean"},
        autostop=closed(idle_minutes=WHOLE, down={"type": "boolean"}),
        job_recovery=closed(max_restarts_on_errors=WHOLE),
    ),
)
SPOT: dict[str, Any] = {
    "resources": {"accelerators": "A100:4", "infra": "aws/us-east-1", "use_spot": True},
    "file_mounts": {"/runs": {"source": "s3://my-runs", "mode": "MOUNT_CACHED"}},
}


def written(**job: Any) -> dict[str, Any]:
    rendered = SkypilotLauncher(NoOptions()).render(a_job(**job))
    content: dict[str, Any] = yaml.safe_load(rendered.files["skypilot.yaml"])
    jsonschema.validate(content, TASK)
    return content


@pytest.mark.parametrize("job", [{}, {"time_limit_s": 60, "image": None, "workers": 2}])
@pytest.mark.parametrize("patch", [{}, SPOT])
def test_every_field_is_skypilots(job: dict[str, Any], patch: dict[str, Any]) -> None:
    assert written(**job, patch=patch)["num_nodes"] == 2


def test_a_misspelt_field_is_found() -> None:
    with pytest.raises(jsonschema.ValidationError):
        written(patch={"resources": {"use_sport": True}})


def test_machines_leave_no_bill_behind_and_spot_ones_are_replaced() -> None:
    assert written()["resources"]["autostop"] == {"idle_minutes": 10, "down": True}
    spot = written(patch=SPOT, max_restarts=5)["resources"]
    assert spot["job_recovery"] == {"max_restarts_on_errors": 5}
    assert "autostop" not in spot
    rendered = SkypilotLauncher(NoOptions()).render(a_job(patch=SPOT))
    assert rendered.submit[:3] == ("sky", "jobs", "launch")
    assert SkypilotLauncher(NoOptions()).render(a_job()).submit[:3] == ("sky", "launch", "-c")


def test_gpus_have_a_type() -> None:
    with pytest.raises(UsageError, match="accelerators"):
        written(gpus_per_node=4)


@pytest.mark.parametrize(
    ("code", "limit_s", "expected"), [(65, 60, 65), (75, 60, 0), (75, None, 75)]
)
def test_out_of_time_is_no_failure(
    code: int, limit_s: int | None, expected: int, tmp_path: Path
) -> None:
    """With a stand-in for Python that ends with the code, in a real shell."""
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@"\nexit {code}\n')
    python.chmod(0o755)
    odd = "a 'quoted' $HOME `word`"
    done = subprocess.run(
        ["bash", "-c", written(options=("--note", odd), time_limit_s=limit_s)["run"]],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/somewhere"},
        capture_output=True,
        text=True,
        timeout=patient(30),
        check=False,
    )
    assert done.returncode == expected
    assert odd in done.stdout.splitlines()
