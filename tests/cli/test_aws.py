"""`paceline aws` as a user runs it, against moto's server."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode
from paceline.provision.aws.orphaned_resources import find_orphaned
from tests.cli.conftest import Paceline
from tests.provision.aws.account import Account, emptied, served

pytestmark = pytest.mark.xdist_group("aws")

UP = ["aws", "up", "--allow-ssh-from", "192.0.2.7", "--no-efa"]


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
    """Once while AWS makes the stack, once while the nodes start."""
    account.faults(hold=number == signal.SIGINT)
    awaited = "making the stack" if number == signal.SIGINT else "waiting for ssh"
    process = paceline.start(*UP, "--yes")
    assert process.stderr is not None
    for line in process.stderr:
        if awaited in line:
            assert len(find_orphaned(account.aws(), "paceline")) > 8
            process.send_signal(number)
            break
    rest = process.stderr.read()  # up to the end of the process
    assert paceline.finish(process).code == ExitCode.RESUMABLE, rest
    assert "nothing is left\npaceline: interrupted" in rest
    assert find_orphaned(account.aws(), "paceline") == []


@pytest.mark.slow
def test_from_up_to_down(account: Account, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*UP, "--yes", "--no-wait"]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert "5.672 USD an hour and node" in shown.err
    assert "96 of 768 needed, 0 in use" in shown.err
    assert main(["aws", "status"]) == ExitCode.DONE
    assert "stack CREATE_COMPLETE\nNode0    running" in capsys.readouterr().out
    account.faults(console=_console())
    assert main(["aws", "hosts", "--write", "hosts.txt"]) == ExitCode.DONE
    shown = capsys.readouterr()
    assert shown.out == Path("hosts.txt").read_text()
    assert shown.out.count("slots=4 user=ubuntu") == 2
    home = Path.home() / ".paceline/aws/paceline"
    assert home.joinpath("known_hosts").read_text().count("ssh-ed25519 AAAA") == 2
    config = home.joinpath("ssh_config").read_text()
    assert "StrictHostKeyChecking yes" in config
    assert ".ssh/id_ed25519" in config
    assert main(["aws", "down"]) == ExitCode.DONE
    assert "nothing is left" in capsys.readouterr().err
    assert main(["aws", "status"]) == ExitCode.DONE
    assert "no nodes named paceline" in capsys.readouterr().out
    assert main(["aws", "hosts"]) == ExitCode.USAGE
    capsys.readouterr()


def _console() -> str:
    from tests.provision.aws.account import PUBLIC_KEY

    begin, end = (f"-----{word} SSH HOST KEY KEYS-----" for word in ("BEGIN", "END"))
    return f"{begin}\n{PUBLIC_KEY}\n{end}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_nobody_pays_without_being_asked(
    account: Account, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(UP) == ExitCode.USAGE
    assert "give --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", _Terminal("no\n"))
    assert main(UP) == ExitCode.DONE
    assert "nothing was made" in capsys.readouterr().err
    assert find_orphaned(account.aws(), "paceline") == []


class _Terminal:
    def __init__(self, line: str) -> None:
        self._line = line

    def isatty(self) -> bool:
        return True

    def readline(self) -> str:
        return self._line


@pytest.mark.slow
def test_a_dry_run_prints_and_makes_nothing(
    account: Account, capsys: pytest.CaptureFixture[str]
) -> None:
    account.faults(quota=0)
    assert main([*UP, "--dry-run", "--nodes", "3", "--max-hours", "2"]) == ExitCode.DONE
    printed = json.loads(capsys.readouterr().out)
    assert "Node2" in printed["template"]["Resources"]
    assert printed["parameters"]["StopAfterMinutes"] == "120"
    assert printed["parameters"]["SshFrom"] == "192.0.2.7/32"
    assert find_orphaned(account.aws(), "paceline") == []


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
