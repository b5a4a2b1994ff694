"""`paceline aws` as a user runs it, against moto's server."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from paceline.provision.aws.stack import connect, find_leftovers
from tests.cli.conftest import Paceline
from tests.provision.aws.account import PUBLIC_KEY, Account, emptied, served

pytestmark = pytest.mark.xdist_group("aws")

UP = ["aws", "up", "--allow-ssh-from", "192.0.2.7", "--no-efa", "--image", "ami-1e749f67"]


@pytest.fixture(scope="module")
def moto() -> Iterator[Account]:
    with served() as account:
        yield account


@pytest.fixture
def account(moto: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    return emptied(moto, tmp_path, monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_an_interrupted_up_leaves_nothing(
    paceline: Paceline, account: Account, number: signal.Signals
) -> None:
    """Once while AWS creates the stack, once while the nodes start."""
    account.faults(hold=number == signal.SIGINT)
    awaited = "creating the stack" if number == signal.SIGINT else "waiting for the nodes"
    process = paceline.start(*UP, "--yes")
    assert process.stderr is not None
    for line in process.stderr:
        if awaited in line:
            assert len(find_leftovers(connect(None), "paceline")) > 6
            process.send_signal(number)
            break
    rest = process.stderr.read()  # up to the end of the process
    assert paceline.finish(process).code == ExitCode.RESUMABLE, rest
    assert "nothing is left of paceline in us-east-1\npaceline: interrupted" in rest
    assert find_leftovers(connect(None), "paceline") == []


@pytest.mark.slow
def test_from_up_to_down(account: Account, capsys: pytest.CaptureFixture[str]) -> None:
    begin, end = (f"-----{word} SSH HOST KEY KEYS-----" for word in ("BEGIN", "END"))
    account.faults(console=f"{begin}\n{PUBLIC_KEY}\n{end}\n")
    assert main([*UP, "--yes"]) == ExitCode.DONE
    assert "paceline train RECIPE --hostfile" in capsys.readouterr().err
    assert main([*UP, "--yes"]) == ExitCode.USAGE  # there is one already
    home = Path.home() / ".paceline/aws/paceline"
    assert home.joinpath("known_hosts").read_text().count("ssh-ed25519 AAAA") == 2
    config = home.joinpath("ssh_config").read_text()
    assert "StrictHostKeyChecking yes" in config
    assert ".ssh/id_ed25519" in config
    capsys.readouterr()
    assert main(["aws", "status"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "stack CREATE_COMPLETE\nNode0    running" in shown
    assert shown.count("  stops 20") == 2
    assert main(["aws", "hosts"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert shown == home.joinpath("hosts").read_text()
    assert shown.count("slots=4 user=ubuntu") == 2
    assert main(["aws", "down"]) == ExitCode.DONE
    assert not home.exists()
    assert "nothing is left" in capsys.readouterr().err
    assert main(["aws", "status"]) == ExitCode.DONE
    assert "no nodes named paceline" in capsys.readouterr().out
    assert main(["aws", "hosts"]) == ExitCode.USAGE
    capsys.readouterr()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_nobody_pays_without_being_asked(
    account: Account, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(UP) == ExitCode.USAGE
    assert "add --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", _Terminal("no\n"))
    assert main(UP) == ExitCode.DONE
    assert "nothing was created" in capsys.readouterr().err
    assert find_leftovers(connect(None), "paceline") == []


class _Terminal:
    def __init__(self, line: str) -> None:
        self._line = line

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._line


@pytest.mark.slow
def test_a_dry_run_prints_and_creates_nothing(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*UP, "--dry-run", "--nodes", "3", "--max-hours", "2"]) == ExitCode.DONE
    printed = json.loads(capsys.readouterr().out)
    assert "Node2" in printed["template"]["Resources"]
    assert printed["parameters"]["StopAfterMinutes"] == "120"
    assert printed["parameters"]["SshFrom"] == "192.0.2.7/32"
    assert find_leftovers(connect(None), "paceline") == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "what to do is missing"),
        (["upp"], "unknown action 'upp'"),
        (["up", "--node", "2"], "unknown option '--node'"),
        (["up", "--nodes", "0"], "--nodes is 0"),
        (["up", "--allow-ssh-from", "0.0.0.0/0"], "let the world in"),
        (["down", "--yes"], "unknown option '--yes'"),
    ],
)
def test_wrong_usage(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aws", *words]) == ExitCode.USAGE
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("action", [[], ["up"], ["status"], ["hosts"], ["down"]])
def test_help(action: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aws", *action, "--help"]) == ExitCode.DONE
    assert "paceline aws" in capsys.readouterr().out
