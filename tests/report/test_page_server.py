"""The served page: who may read it, and when it is made again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode, UsageError
from paceline.report.page_server import FollowedPage, PageServer, version_of
from paceline.results.run_directory import RunDirectory

MakeRun = Callable[..., RunDirectory]


def fetch(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


@contextmanager
def serving(page: FollowedPage) -> Iterator[PageServer]:
    with PageServer(page, "127.0.0.1", 0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_only_who_knows_the_path_reads_the_page() -> None:
    with serving(FollowedPage(lambda: "1", lambda version: f"<p>{version}")) as server:
        assert fetch(server.url) == "<p>1"
        assert fetch(f"{server.url}version") == "1"
        root = server.url.removesuffix(server.path)
        assert len(server.path) > 20
        for path in ("/", "/version", "/..", f"{server.path}..", f"{server.path}run.json"):
            with pytest.raises(HTTPError, match="404") as caught:
                fetch(root + path)
            caught.value.close()


def test_the_page_is_made_again_when_something_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    versions = iter(["1", "1", "2", "3"])

    def render(version: str) -> str:
        made.append(version)
        return version

    page = FollowedPage(lambda: next(versions), render)
    assert page.current() == ("1", b"1")
    assert page.current() == ("1", b"1")
    assert page.current() == ("1", b"1")  # not yet: a training may need the processor
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert page.current() == ("3", b"3")
    assert made == ["1", "3"]


def test_files_of_the_run_make_versions(tmp_path: Path) -> None:
    seen = {version_of(tmp_path)}
    for name in (
        "run.json",
        "metrics.csv",
        "evaluation/confusion.json",
        "logs/failure-rank-0.json",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        seen.add(version_of(tmp_path))
    with (tmp_path / "metrics.csv").open("a") as table:
        table.write("1\n")
    seen.add(version_of(tmp_path))
    seen.add(version_of(tmp_path, "ended"))
    assert len(seen) == 7
    (tmp_path / ".metrics.csv.01234567").touch()  # being written
    (tmp_path / "report.html").touch()
    assert version_of(tmp_path) in seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "80"], "needs --watch"),
        (["--watch", "--port", "70000"], "from 0 to 65535"),
        (["--watch"], "holds no training"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), *words]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_an_address_that_is_not_ours_is_refused() -> None:
    page = FollowedPage(lambda: "", lambda version: version)
    with pytest.raises(UsageError, match=r"can't listen on 192\.0\.2\.1, port 0"):
        PageServer(page, "192.0.2.1", 0)


@pytest.mark.slow
def test_the_command_follows_a_run_until_ctrl_c(make_run: MakeRun) -> None:
    run = make_run(done=3, because=None)
    command = [sys.executable, "-m", "paceline", "report", str(run.path), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        assert url.startswith("http://127.0.0.1:")
        page = fetch(url)
        assert f'data-version="{fetch(f"{url}version")}"' in page
        assert "connect-src 'self'" in page
        assert not run.report_html.exists()  # what is served is not written
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == ExitCode.DONE
