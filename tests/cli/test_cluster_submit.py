"""Options about where a training goes are refused where they mean nothing."""

from dataclasses import replace

import pytest

from paceline.cli import cluster_submit
from paceline.cli.cluster_submit import take_cluster_choice
from paceline.errors import UsageError
from paceline.launch.registry import launchers
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


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        ("paceline.launch.slurm:SlurmOptions", "partition"),
        ("paceline.launch.cluster:ClusterOptions", "nodes"),
        ("paceline.optim.options:OptimOptions", "optimizer"),
    ],
)
def test_an_option_of_two_launchers(
    options: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(launchers()["slurm"], options=options)
    monkeypatch.setattr(cluster_submit, "launchers", lambda: {**launchers(), "condor": entry})
    with pytest.raises(UsageError, match=f"'condor' has the option --{taken}, a name that is"):
        cluster_submit.cluster_options.__wrapped__()
