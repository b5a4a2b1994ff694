import os
import shlex
import subprocess
import sys
import threading
import venv
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from paceline import __version__
from paceline.errors import InfrastructureError, UsageError
from paceline.launch.ssh import installer
from paceline.launch.ssh.code_sync import (
    build_wheel,
    install,
    receiver_command,
    sync_code,
    sync_command,
)
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from tests.support.needs import RSYNC, need

_OPTIONS = HostsOptions(hosts="a")


def test_the_wheel_has_all_files_and_is_the_same_each_time() -> None:
    name, content = build_wheel()
    assert (name, content) == build_wheel()
    with zipfile.ZipFile(BytesIO(content)) as wheel:
        names = wheel.namelist()
        record = wheel.read(f"paceline-{__version__}.dist-info/RECORD").decode().splitlines()
    assert "paceline/launch/ssh/installer.py" in names
    assert not [name for name in names if "__pycache__" in name]
    assert [line.split(",")[0] for line in record] == names


def test_nothing_of_a_path_is_seen_by_a_shell() -> None:
    host = Host(name="fd00::1", user="bob", directory="~/a b;id")
    command = sync_command(host, _OPTIONS, Path("/home/my code"))
    assert "--protect-args" in command
    assert command[-3:] == ["--", "/home/my code/", "[fd00::1]:a b;id/"]
    rsh = next(word for word in command if word.startswith("--rsh="))
    assert "bob" in shlex.split(rsh.removeprefix("--rsh="))


@pytest.mark.parametrize(
    "directory",
    ["/", "//", "~", "~/", ".", "~bob/x", "~/a/..", "/a/../b", "/root", "/home/bob", None],
)
def test_no_home_and_no_root_is_copied_into(directory: str | None) -> None:
    with pytest.raises(UsageError, match="a: --sync-code doesn't copy into dir="):
        sync_command(Host(name="a", directory=directory), _OPTIONS, Path("/x"))


@pytest.mark.parametrize(
    ("directory", "removes"),
    [("~/paceline/x", True), ("~/paceline", False), ("~/code", False), ("/paceline/x", False)],
)
def test_only_below_its_own_directory_it_removes(directory: str, removes: bool) -> None:
    command = sync_command(Host(name="a", directory=directory), _OPTIONS, Path("/x"))
    assert any(word.startswith("--del") for word in command) == removes


def tree(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def files_in(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be where ssh comes in on a host that is near."""
    need(RSYNC)
    made = tmp_path / "home"
    made.mkdir()
    monkeypatch.chdir(made)
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("near")
def test_code_is_made_the_same_and_runs_are_left_alone(tmp_path: Path, home: Path) -> None:
    here, there = tmp_path / "here", home / "paceline/my code"
    ours = (
        "a.py",
        "new/b.py",
        "out [1]/now/run.json",
        "out [1]/now/.launcher-x",
        "out/.launcher-y",
    )
    tree(here, *ours, "runs/r/run.json", "data/big")
    (here / ".gitignore").write_text("data\n")
    theirs = {"out [1]/now/metrics.csv", "out/old/snapshots/step-000000000001/part", "data/theirs"}
    tree(there, "old.py", *theirs)
    host = Host(name="a", directory="~/paceline/my code")
    sync_code([host], _OPTIONS, here, keep=["out [1]/now"])
    assert files_in(there) == theirs | {"a.py", "new/b.py", ".gitignore"}
    mine = home / "mine"
    tree(mine, "precious")
    sync_code([Host(name="a", directory="~/mine")], _OPTIONS, here, keep=["out [1]/now"])
    assert files_in(mine) == {"precious", "a.py", "new/b.py", ".gitignore"}


@pytest.mark.slow
@pytest.mark.usefixtures("near")
def test_a_copy_that_fails_is_explained(tmp_path: Path, home: Path) -> None:
    with pytest.raises(InfrastructureError, match="nowhere: nothing listens at its ssh port"):
        sync_code([Host(name="nowhere", directory="~/x")], _OPTIONS, tmp_path)
    (home / "file").touch()
    with pytest.raises(InfrastructureError, match=r"a: rsync ended with code \d+: .*file"):
        sync_code([Host(name="a", directory="~/file/x")], _OPTIONS, tmp_path)


@pytest.mark.parametrize(
    ("code", "said", "part"),
    [
        (12, "bash: line 1: rsync: command not found", "a: there is no rsync there"),
        (127, "bash: line 1: rsync: command not found", "a: there is no rsync there"),
        (12, "ssh: connect to host a port 22: Connection refused", "a: nothing listens"),
        (255, "ssh: connect to host a port 22: Connection refused", "a: nothing listens"),
        (12, "kex_exchange: gone", "a: the connection ended: kex_exchange: gone"),
    ],
)
def test_what_broke_rsyncs_stream_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str, part: str
) -> None:
    program = tmp_path / "rsync"  # the real one can't be had to lose this race
    lines = f"{said}\nrsync: connection unexpectedly closed\nrsync error: code {code}"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{lines}' >&2\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(InfrastructureError, match=part):
        sync_code([Host(name="a", directory="~/x")], _OPTIONS, tmp_path)


def test_the_environment_is_made_by_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with installer.locked(file), pytest.raises(RuntimeError, match="held by another"):  # noqa: SIM117
        with installer.locked(file, 0.0):
            pass
    with installer.locked(file, 0.0):
        pass


def test_what_another_host_has_made_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[Path] = []

    def make(path: Path, _name: str, _wheel: bytes) -> None:
        made.append(path)
        path.mkdir()
        (path / "complete").touch()

    monkeypatch.setattr(installer, "make", make)
    monkeypatch.setattr(installer, "has_version", lambda *_: False)
    asked = {"python": "", "version": "0", "name": "x.whl", "wheel": ""}
    pythons: list[str] = []
    gate = threading.Barrier(4)

    def install_one() -> None:
        gate.wait(10.0)
        pythons.append(installer.install(asked))

    threads = [threading.Thread(target=install_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(pythons) == 4
    assert len(set(pythons)) == 1


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    ("program", "part"),
    [
        ("exit 0", "a: .* there didn't say where it has put Paceline: it said nothing"),
        ("echo Welcome; echo '[1]'", r"it has put Paceline: Welcome; \[1\]"),
        ("echo hm >&2; exit 3", "a: .*/python there ended with code 3: hm"),
        ('echo \'{"error": "no pip"}\'; echo Bye', "can't be installed: no pip"),
    ],
)
def test_what_a_host_says_instead_is_shown(tmp_path: Path, program: str, part: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\n{program}\n")
    python.chmod(0o755)
    with pytest.raises(InfrastructureError, match=part):
        install([Host(name="a", python=str(python))], _OPTIONS)


def test_the_receiver_runs_under_the_hosts_python() -> None:
    assert shlex.split(receiver_command(Host(name="a", python="/p y")))[:2] == ["exec", "/p y"]
    assert shlex.split(receiver_command(Host(name="a")))[1] == "python3"


@pytest.mark.usefixtures("near")
def test_a_host_that_has_this_paceline_keeps_its_python() -> None:
    (host,) = install([Host(name="a", python=sys.executable)], _OPTIONS)
    assert host.python == sys.executable


@pytest.mark.slow
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
