"""What listens while a training runs over several hosts, and what a stranger reaches of it."""

import csv
import signal
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from tests.hosts.byhand import PORT, ByHand
from tests.hosts.conftest import MakeRig
from tests.hosts.overhosts import OverHosts
from tests.hosts.sockets import listeners, reached
from tests.launch.waiting import until

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("hosts")]

ENDLESS = ("--epochs", "5000", "--target-accuracy", "none")


def test_workers_listen_at_the_chosen_address_alone(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(hosts=2)
    training = ByHand(rig, tmp_path / "run", *ENDLESS)
    training.wait_for_epoch()
    reachable: set[tuple[str, int]] = set()
    for rank, host in enumerate(rig.hosts):
        found = listeners(host)
        assert {(s.protocol, s.address, s.process) for s in found} == {
            ("tcp", host.address, "python")
        }
        ports = {(s.address, s.port) for s in found}
        assert ((host.address, PORT) in ports) == (rank == 0)
        reachable |= ports
    # A stranger reaches the store on rank 0 and the pairs of Gloo in every worker: neither asks who
    # it is. Garbage sent to them does no harm; whoever speaks the store's protocol could do some.
    assert reached(rig.stranger, reachable) == reachable
    rows = epochs_done(training.run_dir)
    until(lambda: epochs_done(training.run_dir) > rows + 1)
    training.workers[1].send_signal(signal.SIGINT)
    assert training.codes() == [75, 75], training.said(0)


def test_over_ssh_strangers_reach_the_pairs_of_gloo_alone(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(hosts=2)
    training = OverHosts(rig, tmp_path / "over")
    training.reach_gate(0)
    (store,) = listeners(rig.client)
    assert (store.protocol, store.on_loopback, store.process) == ("tcp", True, "python")
    open_ports, closed = set(), {(rig.client.address, store.port)}
    for host in rig.hosts:
        found = listeners(host)
        assert {(s.protocol, s.address, s.process) for s in found} == {
            ("tcp", host.address, "python"),  # Gloo's, in the worker
            ("tcp", "127.0.0.1", "sshd"),  # leads to the store on the client
        }
        open_ports |= {(s.address, s.port) for s in found if not s.on_loopback}
        closed |= {(host.address, s.port) for s in found if s.on_loopback}
    # Gloo doesn't ask who comes, but garbage does it no harm.
    assert reached(rig.stranger, open_ports | closed) == open_ports
    training.open_gate(0)
    training.reach_gate(0, 2)

    # One worker raises: the end of this training, told as what it is and where.
    training.raise_on_rank_1()
    training.open_all()
    assert training.finish() == ExitCode.JOB, training.err
    assert "The training failed on rank 1 (h1, step" in training.err
    assert training.err.count("Traceback (most recent call last)") == 1
    assert 'raise ValueError("boom")' in training.err
    assert [rig.processes(n) for n in range(2)] == [[], []]


def epochs_done(run_dir: Path) -> int:
    with (run_dir / "metrics.csv").open() as file:
        return len(list(csv.DictReader(file)))
