"""Snapshots to write: small, with tensors of several kinds."""

from collections.abc import Callable

import pytest
import torch

from paceline.checkpoint.format import Snapshot
from paceline.checkpoint.host_tensors import weights_sha256

MakeSnapshot = Callable[..., Snapshot]
Same = Callable[[Snapshot, Snapshot], bool]


@pytest.fixture
def make_snapshot() -> MakeSnapshot:
    def make(step: int, size: int = 100) -> Snapshot:
        generator = torch.Generator().manual_seed(step)
        weight = torch.randn(2, 3, 4, 4, generator=generator)
        model = {
            "conv/weight": weight.to(memory_format=torch.channels_last),
            "bias": torch.randn(size, generator=generator),
            "count": torch.tensor(step),
            "none": torch.empty(0, 3),
        }
        workers = {"rng": torch.arange(7, dtype=torch.uint8)}
        state = {"epoch": step // 10, "history": [[1, 0.25], {"a": None}], "text": "é"}
        tensors = {"model": model, "optimizer": {"m/x": weight * 2}, "workers": workers}
        return Snapshot(step=step, tensors=tensors, state=state)

    return make


@pytest.fixture
def same() -> Same:
    def equal(a: Snapshot, b: Snapshot) -> bool:
        hashes = [{n: weights_sha256(t) for n, t in s.tensors.items()} for s in (a, b)]
        return (a.step, a.state) == (b.step, b.state) and hashes[0] == hashes[1]

    return equal
