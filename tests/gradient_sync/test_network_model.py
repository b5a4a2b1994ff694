"""Seconds of collectives: against simulated rings, and against what was measured."""

from math import inf

import pytest

from paceline.gradient_sync.network_model import Cluster, Network, ring_bytes


def cluster(nodes: int, per_node: int = 1, rate: float = 100.0, **more: object) -> Cluster:
    network = Network(bandwidth_bytes_per_s=rate, round_trip_s=0.0)
    return Cluster(**{"nodes": nodes, "per_node": per_node, "network": network, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (8, 1), (1, 4), (2, 3), (4, 2)])
def test_a_ring_takes_as_long_as_one_that_is_played(nodes: int, per_node: int) -> None:
    slow = Network(bandwidth_bytes_per_s=10.0, round_trip_s=0.5)
    fast = Network(bandwidth_bytes_per_s=40.0, round_trip_s=0.125)
    given = Cluster(nodes=nodes, per_node=per_node, network=slow, within=fast)
    workers = nodes * per_node
    links = [
        slow if nodes > 1 and rank % per_node == per_node - 1 else fast for rank in range(workers)
    ]
    size = 960.0
    latency = max(
        sum(links[(start + hop) % workers].round_trip_s for hop in range(workers - 1))
        for start in range(workers)
    )
    rate = min(link.bandwidth_bytes_per_s for link in links)
    played = 2 * (latency + (workers - 1) * size / workers / rate)
    assert given.ring_s(size) == pytest.approx(played)


def test_one_worker_exchanges_nothing() -> None:
    alone = cluster(1)
    assert (alone.all_reduce_s(1e9), alone.all_to_all_s(1e9), alone.all_gather_s(1e9)) == (0, 0, 0)


def test_workers_of_a_node_share_its_link_as_each_collective_needs() -> None:
    """Eight workers on two nodes: a ring crosses a link once, an all-to-all with every pair."""
    shared = cluster(2, 4)
    assert shared.all_reduce_s(800.0) == pytest.approx(2 * 7 / 8 * 800 / 100)
    assert shared.all_to_all_s(800.0) == pytest.approx(4 * 4 * 100 / 100)
    assert shared.all_gather_s(800.0) == pytest.approx(7 * 100 / 100)


def test_where_nodes_add_up_in_their_memory_their_sums_cross_alone() -> None:
    shared = cluster(2, 4, shares_memory=True).between
    assert shared.all_reduce_s(800.0) == pytest.approx(800 / 100)
    assert shared.all_to_all_s(800.0) + shared.all_gather_s(800.0) == pytest.approx(800 / 100)
    assert cluster(2, 4).between == cluster(2, 4)


def test_without_a_network_within_a_node_it_takes_no_time() -> None:
    assert cluster(1, 8).all_reduce_s(1e9) == 0
    assert cluster(1, 8).slowest_bytes_per_s == inf


def test_a_tree_wins_where_latency_counts_and_only_nccl_has_it() -> None:
    network = Network(bandwidth_bytes_per_s=1e9, round_trip_s=1e-4)
    ring = Cluster(nodes=1024, network=network)
    tree = Cluster(nodes=1024, network=network, library="nccl")
    assert ring.all_reduce_s(4e3) == pytest.approx(2 * 1023 * 1e-4, rel=1e-3)
    assert tree.all_reduce_s(4e3) == pytest.approx(2 * 10 * 0.5e-4, rel=1e-1)
    few = Cluster(nodes=4, network=network, library="nccl")
    assert few.all_reduce_s(1e9) == few.ring_s(1e9) < few.tree_s(1e9)


GOODPUT = {200: 191.9e6 / 8, 1000: 957.2e6 / 8}


@pytest.mark.parametrize(
    ("workers", "rate", "measured_s"),
    [(4, 200, 2.5185), (4, 1000, 0.5017), (8, 200, 2.930), (8, 1000, 0.5916)],
)
def test_gloo_takes_as_long_as_was_measured(workers: int, rate: int, measured_s: float) -> None:
    """40 MB between network namespaces: 2 % is more than the measurements differ by."""
    network = Network(bandwidth_bytes_per_s=GOODPUT[rate], round_trip_s=5e-5)
    predicted = Cluster(nodes=workers, network=network).all_reduce_s(40e6)
    assert predicted == pytest.approx(measured_s, rel=0.02)


@pytest.mark.parametrize(
    ("one_way_s", "size", "rate", "measured_s", "tolerance"),
    [
        (0.001, 4e3, 1000, 0.0144, 0.2),
        (0.005, 4e3, 1000, 0.063, 0.1),
        (0.001, 40e6, 1000, 1.024 * 0.5016, 0.02),
        (0.005, 40e6, 1000, 1.19 * 0.5016, 0.07),
        (0.005, 40e6, 200, 1.007 * 2.5026, 0.03),
    ],
)
def test_gloo_pays_a_round_trip_a_step(
    one_way_s: float, size: float, rate: int, measured_s: float, tolerance: float
) -> None:
    network = Network(bandwidth_bytes_per_s=GOODPUT[rate], round_trip_s=2 * one_way_s)
    predicted = Cluster(nodes=4, network=network).all_reduce_s(size)
    assert predicted == pytest.approx(measured_s, rel=tolerance)


def test_bytes_of_a_ring() -> None:
    assert ring_bytes(800, 8) == 1400
    assert ring_bytes(800, 1) == 0
