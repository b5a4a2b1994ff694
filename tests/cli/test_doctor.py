import json
import socket
import sys
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--here", "--device", "cpu"]) == ExitCode.DONE
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in shown] == [["ok", "place"], ["ok", "device"]]


def test_a_fault_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor", "--here", "--json", "--device", "cpu"]) == ExitCode.JOB
    found = {entry["what"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert found["place"]["state"] == "ok"
    assert found["meeting"]["state"] == "fault"
    assert "MASTER_ADDR is not set" in found["meeting"]["text"]
    assert {"what", "state", "text"} == found["device"].keys()


@pytest.mark.slow
def test_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is a fault here, though the machine may be busy."""
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--json", "--device", "cpu"]) == ExitCode.DONE
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {"findings", "hosts", "links", "all_reduce"}
    assert {"versions", "memory", "disk", "GPUs"} <= {f["what"] for f in told["findings"]}
    assert [host["name"] for host in told["hosts"]] == [socket.gethostname()]
    assert (told["links"], told["all_reduce"]) == ([], None)


@pytest.mark.slow
def test_a_recipe_whose_data_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own.py").write_text(
        "from pathlib import Path\n"
        "from paceline.errors import DataError\n"
        "def build(*, folder: Path = Path('here')):\n"
        "    raise DataError(f'there is no {folder}')\n"
    )
    options = ["--folder", "images", "--device", "cpu", "--run-dir", "out/first"]
    assert main(["doctor", "own.py:build", *options]) == ExitCode.JOB
    shown = capsys.readouterr()
    lines = [line for line in shown.out.splitlines() if line.startswith("  fault")]
    assert [line.split()[:6] for line in lines] == [
        ["fault", "data", *"there is no images".split()]
    ]
    assert shown.out.endswith("Fix these and rerun `paceline doctor`.\n")
    assert shown.err.splitlines() == ["looking at every host", "looking at the data"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".py") == ["own.py"]
    assert not Path("out").exists()
    del sys.modules["own"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--here --hosts a,b", "--here looks at this process alone"),
        ("digits --here", "--here looks at this process alone"),
        ("--hosts a,-b", "'-b' is no host name"),
        ("--hosts a,b --hostfile x", "give --hosts or --hostfile, not both"),
        ("--hostfile no-such-file", "the hostfile no-such-file can't be read"),
        ("--epochs 3", "unknown option"),
        ("nonsense", "nonsense"),
    ],
)
def test_what_cannot_be_examined(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words.split()]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--help"]) == ExitCode.DONE
    assert "--hostfile" in capsys.readouterr().out
    assert main(["doctor", "digits", "--help"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "--dropout" in shown
    assert "--ssh-config" in shown
