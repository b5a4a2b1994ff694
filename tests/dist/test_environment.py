import pytest

from paceline.dist.environment import Placement, read_placement, started_by_launcher
from paceline.errors import UsageError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "3",
}


def test_alone() -> None:
    assert read_placement({}) == Placement()
    assert read_placement({"RANK": "1"}).source == "alone"  # somebody else's variable
    assert not started_by_launcher({"WORLD_SIZE": "2"})


def test_as_torchs_agent_says() -> None:
    expected = Placement(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        nodes=2,
        attempt=3,
        source="torch",
    )
    assert read_placement(TORCHRUN) == expected


def test_our_own_launchers_attempts_count_first() -> None:
    assert read_placement(TORCHRUN | {"PACELINE_ATTEMPT": "7"}).attempt == 7


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "8", "RANK is 8, but WORLD_SIZE is 8"),
        ("RANK", "-1", "RANK is -1"),
        ("LOCAL_RANK", "4", "LOCAL_RANK is 4, but LOCAL_WORLD_SIZE is 4"),
        ("WORLD_SIZE", "two", "WORLD_SIZE should be a whole number, not 'two'"),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_WORLD_SIZE is 0"),
    ],
)
def test_variables_that_cant_be_right(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_placement(TORCHRUN | {name: value})


def test_nodes_follow_from_the_sizes_where_they_arent_said() -> None:
    few = {
        name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    assert read_placement(few).nodes == 2
