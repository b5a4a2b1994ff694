import json

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


def test_it_says_what_it_can_examine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == ExitCode.USAGE
    assert "paceline doctor --here" in capsys.readouterr().err
