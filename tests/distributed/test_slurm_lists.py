import pytest

from paceline.distributed.launcher_variables import hosts_of, tasks_of_nodes
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("localhost", ["localhost"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12]", ["n08", "n09", "n10", "n12"]),
        ("gpu-a,n[7]", ["gpu-a", "n7"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("n[1-2].cluster.org,x", ["n1.cluster.org", "n2.cluster.org", "x"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_hosts(text: str, hosts: list[str]) -> None:
    assert list(hosts_of(text)) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "a,,b", "n]1[", "n[1,]"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(UsageError, match="not a list of hosts as Slurm writes it"):
        list(hosts_of(text))


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("4,2", [4, 2]), ("2(x3),1", [2, 2, 2, 1])]
)
def test_tasks(text: str, counts: list[int]) -> None:
    assert tasks_of_nodes(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3"])
def test_what_are_no_tasks(text: str) -> None:
    with pytest.raises(UsageError, match="not tasks per node"):
        tasks_of_nodes(text)
