"""Parts of the program that runs first in the container; the whole of it runs in tests/hosts."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.sagemaker import bootstrap as sagemaker_bootstrap
from paceline.launch.sagemaker.bootstrap import has_smddp, install, variables, with_host
from tests.support import standin

RESOURCES: dict[str, Any] = {
    "hosts": ["algo-2", "algo-1"],
    "current_host": "algo-2",
    "current_instance_type": "ml.p4d.24xlarge",
    "network_interface_name": "lo",
}


@pytest.fixture
def smddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(standin.install(tmp_path / "smddp")))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "smdistributed"]:
        del sys.modules[name]


def test_the_resource_configuration_becomes_variables() -> None:
    assert variables(RESOURCES, ["--"], {}) == {
        "PACELINE_NODE": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    elsewhere = RESOURCES | {"network_interface_name": "nowhere0"}
    assert "GLOO_SOCKET_IFNAME" not in variables(elsewhere, ["--"], {})


def test_what_is_set_already_counts() -> None:
    set_before = {"GLOO_SOCKET_IFNAME": "eth7", "PACELINE_NODE": "9"}
    assert variables(RESOURCES, ["--"], set_before).keys() == {
        "PYTHONUNBUFFERED",
        "NCCL_SOCKET_IFNAME",
    }


@pytest.mark.usefixtures("smddp")
@pytest.mark.parametrize(
    ("instance_type", "hosts", "found"),
    [("ml.p4d.24xlarge", 2, True), ("ml.p4d.24xlarge", 1, False), ("ml.g5.12xlarge", 2, False)],
)
def test_sagemakers_backend_where_it_is(instance_type: str, hosts: int, found: bool) -> None:
    assert has_smddp(instance_type, hosts) is found


@pytest.mark.usefixtures("smddp")
def test_the_users_backend_counts_before_sagemakers() -> None:
    assert variables(RESOURCES, ["--"], {})["PACELINE_BACKEND"] == "smddp"
    for command in (["--backend", "nccl"], ["--backend=nccl"]):
        assert "PACELINE_BACKEND" not in variables(RESOURCES, command, {})
    assert "PACELINE_BACKEND" not in variables(RESOURCES, [], {"PACELINE_BACKEND": "nccl"})


def test_sagemakers_backend_is_not_in_every_image() -> None:
    assert not has_smddp("ml.p4d.24xlarge", 2)


def test_rank_0s_host_stands_before_the_trainings_words() -> None:
    words = with_host(["-m", "x", "--run-dir", "/r", "--", "train", "--", "a"], "algo-1")
    assert words == ["-m", "x", "--run-dir", "/r", "--host", "algo-1", "--", "train", "--", "a"]


@pytest.mark.parametrize("has_paceline", [True, False])
def test_what_is_installed(
    has_paceline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda words, check: asked.append(words))
    found = object() if has_paceline else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    (tmp_path / "requirements.txt").write_text("einops\n")
    install("paceline==0.1.0")
    (tmp_path / "requirements.txt").unlink()
    install("paceline==0.1.0")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    own = [] if has_paceline else [[*pip, "paceline==0.1.0"]]
    assert asked == [[*pip, "-r", "requirements.txt"], *own, *own]


MAIN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import bootstrap
bootstrap.INPUT, bootstrap.CODE = Path(sys.argv[2]), Path(sys.argv[3])
bootstrap.main()
"""
COMMAND = """
import json, os, sys
told = {name: os.environ.get(name) for name in ("PACELINE_NODE", "PYTHONUNBUFFERED")}
json.dump({"words": sys.argv[1:], "directory": os.getcwd(), **told}, open("ran.json", "w"))
"""


def test_the_container_becomes_the_trainings_command_with_rank_0s_host(tmp_path: Path) -> None:
    """The whole program in a process of its own, its folders elsewhere; `pip` is a stand-in."""
    channel, given, code = (tmp_path / name for name in ("channel", "input", "code"))
    channel.mkdir()
    (given / "config").mkdir(parents=True)
    shutil.copy(sagemaker_bootstrap.__file__, channel / "bootstrap.py")
    (given / "config" / "resourceconfig.json").write_text(json.dumps(RESOURCES))
    command = ["command.py", "--run-dir", "/r", "--", "train", "digits"]
    job = {"requirement": "paceline==0.1.0", "command": command}
    (channel / "job.json").write_text(json.dumps(job))
    source = tmp_path / "source"
    (source / "pip").mkdir(parents=True)
    (source / "paceline").mkdir()
    (source / "paceline" / "__init__.py").touch()
    (source / "pip" / "__init__.py").touch()
    pip = "import json, sys; json.dump(sys.argv[1:], open('installed.json', 'w'))"
    (source / "pip" / "__main__.py").write_text(pip)
    (source / "command.py").write_text(COMMAND)
    (source / "requirements.txt").write_text("einops\n")
    with tarfile.open(channel / "code.tar.gz", "w:gz") as archive:
        archive.add(source, arcname=".")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, str(channel), str(given), str(code)],
        env={"PATH": os.environ["PATH"], "PACELINE_NODE": "7", "PYTHONPATH": str(source)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((code / "installed.json").read_text())[:2] == ["install", "--quiet"]
    assert json.loads((code / "ran.json").read_text()) == {
        "words": ["--run-dir", "/r", "--host", "algo-1", "--", "train", "digits"],
        "directory": str(code),
        "PACELINE_NODE": "7",  # what is set counts
        "PYTHONUNBUFFERED": "1",
    }
