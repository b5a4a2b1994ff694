"""A compiled model's gradients come bucket by bucket where several workers average them."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.group import Group
from paceline.launch.heartbeat import COMPILING, note
from paceline.training.components import compile_forward, cuts_at_buckets
from paceline.training.options import ComputeOptions
from tests.support.ranks import RankError, run_ranks
from tests.support.sessions import session_on


def graphs_of(_: Group, *, in_buckets: bool) -> list[Tensor]:
    """Compile and run a model once; gives its gradients, after the number of graphs."""
    graphs: list[torch.fx.GraphModule] = []
    note.operation = "step"

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        assert note.operation == COMPILING
        graphs.append(graph)
        return graph

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1800, 1800, bias=False) for _ in range(6)))  # 12.4 MiB each
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        forward = compile_forward(model, in_buckets=in_buckets)
    outputs = forward(torch.ones(2, 1800))
    assert isinstance(outputs, Tensor)
    outputs.sum().backward()
    assert note.operation == "step"
    assert DistributedDataParallel._get_active_ddp_module() is None
    sums = [p.grad.sum() for p in model.parameters() if p.grad is not None]
    return [torch.tensor(len(graphs)), *sums]


@pytest.mark.slow
def test_a_compiled_model_is_cut_where_buckets_end() -> None:
    # each in a process of its own: a compiled backward pass starts autograd's threads for devices,
    # and no other test could fork ranks afterwards
    [[whole, *expected]] = run_ranks(1, partial(graphs_of, in_buckets=False))
    [[cut, *found]] = run_ranks(1, partial(graphs_of, in_buckets=True))
    assert int(whole) == 1
    assert int(cut) == 3  # one layer for the first, small bucket, three, two
    assert len(found) == 6
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("device", "workers", "exact", "cut"),
    [
        ("cuda", 2, False, True),
        ("xpu", 2, False, True),
        ("cuda", 1, False, False),
        ("cuda", 2, True, False),
        ("cpu", 2, False, False),
    ],
)
def test_where_graphs_are_cut(device: str, workers: int, exact: bool, cut: bool) -> None:
    group = cast(Group, SimpleNamespace(device=torch.device(device), world_size=workers))
    assert cuts_at_buckets(ComputeOptions(compile=True), group, exact=exact) is cut
    assert not cuts_at_buckets(ComputeOptions(), group, exact=exact)


def test_weights_that_a_forward_pass_rescales_are_refused(tmp_path: Path) -> None:
    """Each worker would rescale the rows that its own samples use."""

    def body(group: Group) -> None:
        with session_on(group, tmp_path / str(group.world_size)) as s:
            s.model(nn.Sequential(nn.Embedding(5, 2, max_norm=1.0)))

    run_ranks(1, body)
    with pytest.raises(RankError, match=r"0 has max_norm=1\.0"):
        run_ranks(2, body)
