from paceline.launch.ssh.rank_assignment import (
    HostInfo,
    attribute_unreachable,
    clock_lines,
    differences,
    first_ranks,
    others_of,
)


def _sight(name: str, workers: int = 1, **facts: str) -> HostInfo:
    return HostInfo(
        name=name,
        address=f"10.0.0.{len(name)}",
        port=4000,
        workers=workers,
        newest=-1,
        shared=False,
        facts=facts,
    )


def test_ranks_go_through_unequal_hosts_in_their_order() -> None:
    assert first_ranks([_sight("a", 4), _sight("b", 2), _sight("c", 1)]) == [0, 4, 6]


def test_the_same_facts_are_no_difference() -> None:
    assert not differences([_sight("a", torch="2.11"), _sight("b", torch="2.11")])
    assert not differences([])


def test_each_difference_names_host_and_both_values() -> None:
    infos = [_sight("a", torch="2.11", Python="3.11"), _sight("b", torch="2.12")]
    assert differences(infos) == {
        "b": "b has torch 2.12, a has 2.11; b has Python none, a has 3.11"
    }


def test_a_newcomer_has_to_fit_those_that_took_part() -> None:
    infos = [_sight("new", torch="2.12"), _sight("old", torch="2.11")]
    assert list(differences(infos, {"old"})) == ["new"]
    assert list(differences(infos)) == ["old"]


def test_a_host_tries_all_others() -> None:
    infos = [_sight("a"), _sight("bb"), _sight("ccc")]
    assert others_of(infos, 1) == [("a", "10.0.0.1", 4000), ("ccc", "10.0.0.3", 4000)]


def test_the_host_that_most_broken_ways_have_in_common_is_blamed() -> None:
    addresses = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
    blamed = attribute_unreachable({"a": ["b"], "c": ["b"], "b": ["c"]}, addresses)
    assert list(blamed) == ["b"]
    assert blamed["b"].startswith("a doesn't reach b at 10.0.0.2; c doesn't reach b at 10.0.0.2;")
    assert "address=" in blamed["b"]
    assert not attribute_unreachable({"a": []}, addresses)


def test_only_clocks_that_are_far_off_are_named() -> None:
    lines = clock_lines({"a": 0.4, "b": -120.0, "c": None, "d": 61.0})
    assert [line.split(":")[0] for line in lines] == ["b", "d"]
    assert "120 s behind" in lines[0]
