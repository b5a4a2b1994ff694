"""Facts that all workers must share: compared by a store, and what differs is named."""

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from paceline.distributed.startup_facts import WorkerFacts, compare_by_store, disagreement
from paceline.errors import InfrastructureError, JobError


def told(*facts: Mapping[str, str]) -> list[WorkerFacts]:
    return [WorkerFacts(f"node{rank // 2}", own) for rank, own in enumerate(facts)]


def test_workers_that_agree() -> None:
    same = {"lr": "0.1", "torch": "2.15"}
    assert disagreement(told(same, dict(reversed(same.items())), same)) == ""
    assert disagreement(told({})) == ""


def test_rank_host_name_and_both_values_are_told() -> None:
    found = disagreement(told({"lr": "0.01"}, {"lr": "0.01"}, {"lr": "0.01"}, {"lr": "0.02"}))
    assert "rank 3 on node1 has lr 0.02, rank 0 on node0 has 0.01" in found


def test_workers_with_the_same_difference_are_told_of_once() -> None:
    found = disagreement(told({"lr": "1"}, {"lr": "2"}, {"lr": "2"}, {"lr": "3"}))
    assert "rank 1 on node0 and 1 more have lr 2, rank 0 on node0 has 1" in found
    assert "rank 3 on node1 has lr 3" in found
    assert "rank 2" not in found


@pytest.mark.parametrize(("own", "other"), [({"a": "1"}, {}), ({}, {"a": "1"})])
def test_a_fact_that_one_lacks(own: Mapping[str, str], other: Mapping[str, str]) -> None:
    assert "has a" in disagreement(told(own, other))


def test_many_differences_are_counted_and_long_values_cut() -> None:
    found = disagreement(told({}, {f"fact{number}": "x" * 1000 for number in range(9)}))
    assert "fact4" in found
    assert "fact5" not in found
    assert "; and 4 more." in found
    assert "x" * 121 not in found


def test_what_is_told_survives_json() -> None:
    one = WorkerFacts("node", {"lr": "0.1", "names": "é\n"})
    assert WorkerFacts.from_json(one.to_json()) == one


def compare(path: Path, facts: Sequence[Mapping[str, str]], timeout_s: float = 60.0) -> list[str]:
    """Compare on one thread a rank. Returns what each of them was told."""

    def be(rank: int) -> str:
        store = FileStore(str(path), len(facts))
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            compare_by_store(store, rank, len(facts), facts[rank], timeout_s)
        except (JobError, InfrastructureError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(be, range(len(facts))))


def test_all_hear_the_same(tmp_path: Path) -> None:
    assert compare(tmp_path / "same", [{"lr": "1"}] * 3) == ["", "", ""]
    heard = compare(tmp_path / "other", [{"lr": "1"}, {"lr": "1"}, {"lr": "2"}])
    assert len(set(heard)) == 1
    assert "JobError: the workers differ: rank 2 on " in heard[0]


def test_a_worker_that_says_nothing_is_waited_for_no_longer_than_the_timeout() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        store = FileStore(str(Path(scratch) / "store"), 2)
        store.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(InfrastructureError, match=r"rank 0 on .* waited 0.05 s"):
            compare_by_store(store, 0, 2, {}, 0.05)
