"""What a study measures, and in which order."""

from collections import Counter
from itertools import pairwise

import pytest

from paceline.errors import UsageError
from paceline.launch.ssh.hostfile import Host, parse_hosts
from paceline.scaling.plan import (
    first_slots,
    global_batch_of,
    idle_of_methods,
    make_plan,
    make_sizes,
    method_settings,
)
from tests.scaling.studies import size


def test_one_plain_worker_is_always_measured_and_first() -> None:
    sizes = make_sizes((4, 2), ("powersgd", "allreduce"), ())
    assert [each.name for each in sizes] == [
        "1-allreduce",
        "2-powersgd",
        "2-allreduce",
        "4-powersgd",
        "4-allreduce",
    ]
    assert {each.nodes for each in sizes} == {1}


def test_what_costs_something_alone_is_measured_alone_too() -> None:
    names = [each.name for each in make_sizes((1, 2), ("ordered",), ())]
    assert names == ["1-allreduce", "1-ordered", "2-ordered"]


def test_sizes_fill_the_hosts_one_after_the_other() -> None:
    hosts = parse_hosts("a:2,b:1,c:4")
    assert [s.nodes for s in make_sizes((1, 2, 3, 7), ("allreduce",), hosts)] == [1, 1, 2, 3]
    assert first_slots(hosts, 4) == (
        Host(name="a", slots=2),
        Host(name="b", slots=1),
        Host(name="c", slots=1),
    )


@pytest.mark.parametrize(
    ("hosts", "message"),
    [("a:2,b:1", "--workers says 4, and the hosts take 3"), ("a:8,b", "b: say how many workers")],
)
def test_hosts_with_too_few_slots(hosts: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        first_slots(parse_hosts(hosts), 4)


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
def test_sizes_take_turns_in_changing_order(repeats: int) -> None:
    sizes = [size(1), size(2), size(4), size(8)]
    plan = make_plan(sizes, repeats)
    assert plan[0].size == size(1)
    assert Counter(m.size for m in plan) == dict.fromkeys(sizes, repeats)
    rounds = [[m.size for m in plan if m.round == number] for number in range(1, repeats + 1)]
    assert [m.round for m in plan] == sorted(m.round for m in plan)
    assert all(sorted(turn, key=lambda s: s.workers) == sizes for turn in rounds)
    assert all(a != b for a, b in pairwise(rounds))


def test_each_method_gets_its_own_options_and_no_others() -> None:
    given = {"powersgd_rank": 2, "shards": 8, "sync_warmup_steps": 500}
    assert method_settings("allreduce", given, warm=True) == {"sync": "allreduce"}
    assert method_settings("ordered", given, warm=True) == {"sync": "ordered", "shards": 8}
    low_rank = {"sync": "powersgd", "powersgd_rank": 2, "sync_warmup_steps": 500}
    assert method_settings("powersgd", given, warm=False) == low_rank


def test_a_short_measurement_skips_the_warm_up() -> None:
    assert method_settings("powersgd", {"sync_warmup_steps": 500}, warm=True) == {
        "sync": "powersgd",
        "sync_warmup_steps": 2,
    }
    assert "sync_warmup_steps" not in method_settings("powersgd", {}, warm=False)


def test_an_option_that_no_method_has_is_idle() -> None:
    assert not idle_of_methods(("allreduce", "powersgd"), ("powersgd_rank", "precision"))
    idle = idle_of_methods(("allreduce", "ordered"), ("powersgd_rank",))
    assert "it is of powersgd" in idle["powersgd_rank"]


def test_the_batch_grows_with_weak_scaling_alone() -> None:
    assert global_batch_of("weak", 32, 8) == 256
    assert global_batch_of("strong", 256, 8) == 256
