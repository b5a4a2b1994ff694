"""Options about where a training goes are refused where they mean nothing."""

import pytest

from paceline.cli.cluster_submit import take_cluster_choice
from paceline.errors import UsageError
from paceline.options.fields import OptionValue


@pytest.mark.parametrize(
    ("given", "on", "said"),
    [
        ({"partition": "gpu"}, "auto", "--partition has no effect without --on slurm"),
        ({"partition": "gpu"}, "kubernetes", "--partition has no effect without --on slurm"),
        ({"nodes": 2}, "auto", "--nodes has no effect without --on slurm, "),
        ({"min_hosts": 2}, "auto", "--min-hosts has no effect without --hosts or --hostfile"),
        ({"hosts": "a,b", "nodes": 2}, "auto", "--nodes has no effect without --on"),
        ({"hosts": "a,b"}, "slurm", "--on slurm and --hosts can't be combined"),
    ],
)
def test_without_effect(given: dict[str, OptionValue], on: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        take_cluster_choice(given).check(on)


@pytest.mark.parametrize(
    ("given", "on"),
    [
        ({"partition": "gpu", "nodes": 2}, "slurm"),
        ({"hosts": "a,b", "min_hosts": 1}, "auto"),
        ({"lr": 0.1}, "auto"),
    ],
)
def test_with_effect(given: dict[str, OptionValue], on: str) -> None:
    kept = {name: value for name, value in given.items() if name == "lr"}
    take_cluster_choice(given).check(on)
    assert given == kept  # the training's own options stay
