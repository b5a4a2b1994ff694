import shlex
import subprocess
import sys
import venv
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from paceline import __version__
from paceline.errors import InfrastructureError
from paceline.launch.hosts.code import install, receiver_command, sync_command
from paceline.launch.hosts.hostfile import Host
from paceline.launch.hosts.options import HostsOptions
from paceline.launch.hosts.wheel import build_wheel

_OPTIONS = HostsOptions(hosts="a")


def test_the_wheel_has_all_files_and_is_the_same_each_time() -> None:
    name, content = build_wheel()
    assert (name, content) == build_wheel()
    with zipfile.ZipFile(BytesIO(content)) as wheel:
        names = wheel.namelist()
        record = wheel.read(f"paceline-{__version__}.dist-info/RECORD").decode().splitlines()
    assert "paceline/launch/hosts/installer.py" in names
    assert not [name for name in names if "__pycache__" in name]
    assert [line.split(",")[0] for line in record] == names


def test_nothing_of_a_path_is_seen_by_a_shell() -> None:
    host = Host(name="fd00::1", user="bob", directory="~/a b;id")
    command = sync_command(host, _OPTIONS, Path("/home/my code"))
    assert "--secluded-args" in command
    assert command[-3:] == ["--", "/home/my code/", "[fd00::1]:a b;id/"]
    rsh = next(word for word in command if word.startswith("--rsh="))
    assert "bob" in shlex.split(rsh.removeprefix("--rsh="))


def test_the_receiver_runs_under_the_hosts_python() -> None:
    assert shlex.split(receiver_command(Host(name="a", python="/p y")))[:2] == ["exec", "/p y"]
    assert shlex.split(receiver_command(Host(name="a")))[1] == "python3"


@pytest.mark.usefixtures("near")
def test_a_host_that_has_this_paceline_keeps_its_python() -> None:
    (host,) = install([Host(name="a", python=sys.executable)], _OPTIONS)
    assert host.python == sys.executable


@pytest.mark.ranks
@pytest.mark.usefixtures("near")
def test_a_host_without_gets_an_environment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_DEPS", "1")  # what it needs would take minutes to download
    asked = [Host(name="a", python=str(bare / "bin" / "python"))]
    (host,) = install(asked, _OPTIONS)
    assert host.python is not None
    assert host.python.startswith(str(tmp_path / "cache" / "paceline" / __version__))
    program = "from importlib.metadata import version; print(version('paceline'))"
    said = subprocess.run([host.python, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == __version__
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    made = Path(host.python).stat().st_mtime_ns
    assert install(asked, _OPTIONS) == [host]
    assert Path(host.python).stat().st_mtime_ns == made


@pytest.mark.usefixtures("near")
def test_a_host_without_any_python_is_named() -> None:
    with pytest.raises(InfrastructureError, match="a: there is no /no/python there"):
        install([Host(name="a", python="/no/python")], _OPTIONS)
