"""What rules CUDA graphs out, before there is a GPU; tests/pretend_gpu captures some."""

from pathlib import Path

import pytest
from torch import nn

from paceline.distributed.group import Group
from paceline.errors import UsageError
from paceline.training.cuda_graphs import GraphSwitch, graph_switch_of, graphed
from paceline.training.options import ComputeOptions
from tests.support.ranks import run_ranks
from tests.support.trainings import configure, plain_job, run_training_on


def test_on_is_refused_with_compile() -> None:
    with pytest.raises(UsageError, match="--cuda-graphs on can't be combined with --compile"):
        ComputeOptions(cuda_graphs="on", compile=True)
    ComputeOptions(cuda_graphs="auto", compile=True)


@pytest.mark.ranks
def test_a_cpu_has_none() -> None:
    def body(group: Group) -> str:
        for asked in ("off", "auto"):
            switch = graph_switch_of(ComputeOptions(cuda_graphs=asked), None, group)
            assert switch is None
            assert graphed(nn.Linear(2, 2), None, switch, group) is None  # as it was
        with pytest.raises(UsageError) as refused:
            graph_switch_of(ComputeOptions(cuda_graphs="on"), None, group)
        return str(refused.value)

    (refused,) = run_ranks(1, body)
    reason = "only GPUs of NVIDIA have CUDA graphs, and this is cpu"
    assert refused == f"--cuda-graphs on: {reason}. Give --cuda-graphs off, or auto"


@pytest.mark.ranks
def test_synced_batchnorm_of_a_script_rules_them_out() -> None:
    def body(group: Group) -> str:
        switch = GraphSwitch("auto", None)
        module = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
        assert graphed(module, None, switch, group) is None
        return switch.label

    reason = "SyncBatchNorm sends something within the forward pass"
    assert run_ranks(2, body) == [f"auto: off, since {reason}"] * 2


@pytest.mark.ranks
def test_a_training_on_cpus_goes_on_with_auto(tmp_path: Path) -> None:
    settings = configure(epochs=1, cuda_graphs="auto")
    plain = run_ranks(2, run_training_on, tmp_path / "plain", plain_job, configure(epochs=1), None)
    found = run_ranks(2, run_training_on, tmp_path / "auto", plain_job, settings, None)
    assert [each.optimizer for each in found] == [each.optimizer for each in plain]
