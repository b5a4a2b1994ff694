"""Workers that are kept: what they answer, how they fail, what they train."""

import os
from collections.abc import Iterator, Mapping

import pytest

from benchmarks.emulated import vgg19
from benchmarks.fleet import Answer, Fleet, Seat, fleet
from benchmarks.trials import Trial, achieved_bytes_per_s, measure_link, ring_step_s, run, serve
from tests.support.needs import NAMESPACES, need

pytestmark = pytest.mark.ranks
TINY = Trial(network="vgg19", compute_s=0.01, workers=2, lead=2, steps=2)


def tell(seat: Seat, request: Mapping[str, object]) -> Answer:
    if request.get("do") == "fail":
        raise ValueError("no such thing")
    if request.get("do") == "die":
        os.write(2, b"last words")
        os._exit(3)
    return {"pid": os.getpid(), "number": seat.number, "problem": "none", **request}


@pytest.fixture
def workers() -> Iterator[Fleet]:
    with fleet(2, tell) as lent:
        yield lent


def test_each_worker_answers_its_own_request_and_is_kept(workers: Fleet) -> None:
    first = workers.ask([{"value": 1}, {"value": 2}])
    assert [(a["number"], a["value"]) for a in first] == [(0, 1), (1, 2)]
    again = workers.ask([{"value": 3}])
    assert again == [first[0] | {"value": 3}]


def test_a_failure_comes_with_its_traceback(workers: Fleet) -> None:
    with pytest.raises(RuntimeError, match=r"worker 1 failed:(?s:.*)no such thing"):
        workers.ask([{}, {"do": "fail"}])


@pytest.mark.slow
def test_a_worker_that_dies_leaves_its_last_words(workers: Fleet) -> None:
    with pytest.raises(RuntimeError, match="worker 1 ended:\nlast words"):
        workers.ask([{}, {"do": "die"}])


@pytest.mark.slow
def test_a_meeting_is_never_used_twice(workers: Fleet) -> None:
    assert workers.meeting() != workers.meeting()


@pytest.mark.slow
def test_trainings_and_links_on_loopback() -> None:
    with fleet(2, serve) as workers:
        for name in ("first", "second"):
            found = run(TINY, workers, name)
            assert found.step_s > TINY.compute_s
            assert found.cores > 0
        assert achieved_bytes_per_s(workers, 2, 1 << 16) > 0
        assert 0 < ring_step_s(workers, 2) < 1


@pytest.mark.hosts
def test_hosts_send_what_a_ring_sends() -> None:
    need(NAMESPACES)
    with fleet(2, serve, 2000.0) as workers:
        found = run(TINY, workers, "only")
        ring = vgg19().bytes  # 2 (n - 1) / n of them
        assert ring < found.sent_bytes < 1.05 * ring
        workers.set_rate(400.0)
        wire = measure_link(workers)
        assert 0 < wire.bandwidth_bytes_per_s < 400e6 / 8
        assert wire.round_trip_s > 0
