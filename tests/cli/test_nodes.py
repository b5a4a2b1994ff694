"""Two hosts on one machine: network namespaces with a cable between them, 2 + 1 workers."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Paceline, summary
from tests.launch.waiting import patient
from tests.support.needs import NAMESPACES, need

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=patient(30))


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts by name; they reach each other and nothing else."""
    need(NAMESPACES)
    tag = uuid.uuid4().hex[:6]
    names = (f"pl{tag}a", f"pl{tag}b")
    try:
        for name in names:
            ip("netns", "add", name)
        cable = ("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        ip(*cable)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=patient(30))


@pytest.mark.hosts
@pytest.mark.ranks
def test_unequal_nodes_over_a_network(hosts: tuple[str, str], paceline: Paceline) -> None:
    common = ["train", "digits", "--epochs", "2", "--threads", "1", "--global-batch", "64"]
    usual = paceline.run(*common, "--workers", "3", "--run-dir", "usual")
    assert usual.code == 0, usual.err
    common += ["--init-method", f"tcp://{ADDRESSES[0]}:29500", "--world-size", "3"]
    started = []
    for rank, (host, local_rank) in enumerate([(hosts[0], 0), (hosts[0], 1), (hosts[1], 0)]):
        own = ["--rank", str(rank), "--local-rank", str(local_rank), "--run-dir", "apart"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", "paceline", *common, *own],
            cwd=paceline.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        paceline.started.append(process)
        started.append(process)
    for process in started:
        done = paceline.finish(process)
        assert done.code == 0, done.err
    run = paceline.directory / "apart"
    found = described(run)
    assert found["nodes"] == 2
    workers = found["workers"]
    assert isinstance(workers, list)
    assert [(w["node_rank"], w["local_rank"]) for w in workers] == [(0, 0), (0, 1), (1, 0)]
    assert [w["interface"] for w in workers] == [hosts[0], hosts[0], hosts[1]]
    assert [w["address"] for w in workers] == [ADDRESSES[0], ADDRESSES[0], ADDRESSES[1]]
    ours, theirs = summary(run), summary(paceline.directory / "usual")
    # Three gradients have another order where two of them meet in a node's memory.
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)
    assert ours["samples_seen"] == theirs["samples_seen"]


def described(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "run.json").read_text())["placement"]
    return found
