"""Listening and calling on this machine: strangers get nothing, friends get figures."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from paceline.doctor.probes import server as listening
from paceline.doctor.probes.client import Peer, PeerClient, contact, measure
from paceline.doctor.probes.handshake import Tokens
from paceline.doctor.probes.server import ProbeServer
from tests.launch.waiting import patient

HERE = "127.0.0.1"
TOKENS = Tokens.made()
RANGE = (42000, 43000)


@pytest.fixture
def listener() -> Iterator[ProbeServer]:
    found = ProbeServer(HERE, TOKENS, RANGE)
    yield found
    found.close()


def peer_of(listener: ProbeServer) -> Peer:
    return Peer(name="b", address=HERE, ports=listener.ports, datagram_port=listener.datagram_port)


def answer_to(listener: ProbeServer, content: bytes) -> bytes:
    with socket.create_connection((HERE, listener.ports[0]), timeout=patient(10)) as stream:
        with suppress(OSError):  # the connection may be closed before all is sent
            stream.sendall(content)
            stream.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            return stream.recv(1024)
    return b""


def test_it_listens_on_one_address_and_at_both_ends_of_the_range(listener: ProbeServer) -> None:
    first, low, high = listener.ports
    assert 42000 <= low < 42040
    assert 42960 < high <= 43000
    own = {c.laddr for c in psutil.Process().net_connections("inet") if not c.raddr}
    assert {(HERE, port) for port in (first, low, high, listener.datagram_port)} <= set(own)
    assert all(place.ip == HERE for place in own if place.port in listener.ports)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4096,
        Tokens.made().asks.encode() + b'{"do": "meet"}\n',
        TOKENS.asks.encode()[:-1] + b'x{"do": "meet"}\n',
        TOKENS.answers.encode() + b'{"do": "meet"}\n',
    ],
    ids=["nothing", "http", "noise", "another token", "almost the token", "the answer"],
)
def test_a_stranger_gets_not_a_byte(listener: ProbeServer, content: bytes) -> None:
    assert answer_to(listener, content) == b""
    assert PeerClient(peer_of(listener), TOKENS).try_port(listener.ports[0]) == ""


def test_a_strangers_datagram_is_not_answered(listener: ProbeServer) -> None:
    strangers = PeerClient(peer_of(listener), Tokens.made())
    assert strangers.largest_packet(1500) is None


def test_a_probe_without_tokens_admits_nobody() -> None:
    found = ProbeServer(HERE, Tokens(), RANGE)
    try:
        assert answer_to(found, b'{"do": "meet"}\n') == b""
    finally:
        found.close()


@pytest.mark.parametrize("words", [b"nonsense\n", b'{"do": "fly"}\n', b"x" * 5000])
def test_nonsense_of_a_friend_ends_its_connection_alone(
    listener: ProbeServer, words: bytes
) -> None:
    assert answer_to(listener, TOKENS.asks.encode() + words).startswith(TOKENS.answers.encode())
    assert PeerClient(peer_of(listener), TOKENS).try_port(listener.ports[1]) == ""


def test_who_says_nothing_is_sent_away(
    listener: ProbeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_WAIT_S", 0.05)
    with socket.create_connection((HERE, listener.ports[0]), timeout=patient(10)) as stream:
        assert stream.recv(1) == b""


def test_somebody_else_who_listens_is_found_out() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        caller = PeerClient(Peer(name="b", address=HERE, ports=(port,)), TOKENS)

        def pretend() -> None:
            stream, _ = server.accept()
            with stream:
                stream.recv(1024)
                stream.sendall(b"0" * 64)

        thread = threading.Thread(target=pretend)
        thread.start()
        assert caller.try_port(port) == "somebody else listens there"
        thread.join()


def test_a_contact_and_a_closed_port(listener: ProbeServer) -> None:
    with socket.create_server((HERE, 0)) as server:
        shut = server.getsockname()[1]
    peer = peer_of(listener)
    found = contact(
        Peer(
            name="b",
            address=HERE,
            ports=(shut, *peer.ports),
            datagram_port=peer.datagram_port,
        ),
        TOKENS,
        1500,
    )
    assert found.open_ports == listener.ports
    assert found.closed_ports == (shut,)
    assert found.problem == "Connection refused"
    assert found.source == HERE
    assert found.clock_ahead_s == pytest.approx(0.0, abs=0.5)
    assert found.largest_packet == 1500


def test_a_clock_that_is_ahead_is_seen(
    listener: ProbeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def time() -> float:
            return time.time() + 60

    monkeypatch.setattr(listening, "time", Ahead)
    ahead_s, error_s = PeerClient(peer_of(listener), TOKENS).compare_clocks()
    assert ahead_s == pytest.approx(60.0, abs=0.5)
    assert 0 <= error_s < 0.5


def test_a_measurement(listener: ProbeServer) -> None:
    found = measure(peer_of(listener), TOKENS, 0.1, "a")
    assert (found.source, found.target, found.problem) == ("a", "b", "")
    assert found.bandwidth_bytes_per_s is not None
    assert found.bandwidth_bytes_per_s > 10e6
    assert found.several_bytes_per_s is not None
    assert found.round_trip_s is not None
    assert 0 < found.round_trip_s < 0.1


def test_nobody_there_is_a_problem_and_no_exception() -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
    found = measure(Peer(name="b", address=HERE, ports=(port,)), TOKENS, 0.1, "a")
    assert found.problem == "Connection refused"
    assert found.best_bytes_per_s is None


def test_nothing_listens_any_more_after_the_end(listener: ProbeServer) -> None:
    ports = listener.ports
    second = ProbeServer(HERE, TOKENS, RANGE)
    freed = second.ports[0]
    second.close()
    assert PeerClient(peer_of(listener), TOKENS).try_port(ports[0]) == ""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, freed), timeout=patient(5))


def test_ipv6_works_as_well() -> None:
    try:
        found = ProbeServer("::1", TOKENS, RANGE)
    except OSError:
        pytest.skip("this machine has no IPv6")
    try:
        peer = Peer(name="b", address="::1", ports=found.ports, datagram_port=found.datagram_port)
        met = contact(peer, TOKENS, 1500)
        assert met.open_ports == found.ports
        assert (met.source, met.largest_packet) == ("::1", 1500)
    finally:
        found.close()
