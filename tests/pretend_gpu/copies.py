"""Run by test_copies.py: copies between host and device, and what they cost; prints a line each."""

import copy
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from paceline.checkpoint.host_tensors import HostTensors
from paceline.data.loading.device_feed import DeviceFeed
from paceline.distributed.device_copies import copy_all, fetch, send
from paceline.gradient_sync.batchnorm import synchronise_batchnorm
from tests.pretend_gpu.counters import SYNCS, counted_here

DEVICE = torch.device("cuda", 0)


def cost(what: str, work: Callable[[], object]) -> object:
    """Do something twice, and say what the second time has cost."""
    work()
    torch.accelerator.synchronize()
    before = counted_here()
    result = work()
    spent = counted_here() - before
    syncs = sum(spent[name] for name in SYNCS)
    shown = Counter(syncs=syncs, d2h=spent["d2h"], h2d=spent["h2d"], pageable=spent["h2d_pageable"])
    print(what, *(f"{name} {shown[name]}" for name in ("syncs", "d2h", "h2d", "pageable")))
    return result


def buffers() -> list[torch.Tensor]:
    torch.manual_seed(1)
    norms = [nn.BatchNorm2d(width) for width in (3, 8, 16)]
    for norm in norms:
        norm(torch.randn(4, norm.num_features, 2, 2))
    return [buffer.to(DEVICE) for norm in norms for buffer in norm.buffers()]


def main() -> None:
    # Small tensors of several types: one copy, and one wait where the host needs the values.
    given = buffers()
    expected = [buffer.cpu() for buffer in given]
    found = cost("fetch", lambda: fetch(given))
    assert isinstance(found, list)
    assert all(map(torch.equal, found, expected))
    for buffer in given:
        buffer.zero_()
    cost("send", lambda: send(expected, given))
    assert all(
        torch.equal(buffer.cpu(), value) for buffer, value in zip(given, expected, strict=True)
    )
    others = [torch.zeros_like(buffer) for buffer in given]
    cost("copy", lambda: copy_all(others, given))
    assert all(
        torch.equal(other.cpu(), value) for other, value in zip(others, expected, strict=True)
    )

    # A snapshot: later changes on the device and on the host don't reach it.
    torch.manual_seed(2)
    weights = torch.randn(8, 3, 3, 3).to(DEVICE, memory_format=torch.channels_last)
    state = {"weights": weights, "step": torch.tensor(3.0), "bias": torch.randn(8).to(DEVICE)}
    state |= {f"b{number}": buffer for number, buffer in enumerate(given)}
    before = {name: tensor.cpu().clone() for name, tensor in state.items()}
    host = HostTensors(state)
    cost("snapshot", lambda: host.fill(state))
    for tensor in state.values():
        tensor.zero_()
    b"".join(host.chunks())
    for name, view in zip(host._order, host._views, strict=True):
        assert torch.equal(view, before[name]), name

    # A batch: nothing waits for it but what is computed from it.
    feed = DeviceFeed(DEVICE)
    batch = {"images": torch.randn(64, 3, 8, 8), "labels": torch.arange(64)}
    brought = cost("batch", lambda: feed.bring(batch | {"names": ["a"]}))
    assert isinstance(brought, dict)
    assert torch.equal((brought["images"] * 2).cpu(), batch["images"] * 2)
    assert torch.equal(brought["labels"].cpu(), batch["labels"])
    assert brought["names"] == ["a"]

    # BatchNorm's statistics over all workers: nothing waits for them either.
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=DEVICE)
    whole, images = nn.BatchNorm2d(3), torch.randn(6, 3, 4, 4)
    synced = synchronise_batchnorm(copy.deepcopy(whole), DEVICE).to(DEVICE)
    on_device = images.to(DEVICE).requires_grad_()

    def passes() -> torch.Tensor:
        outputs: torch.Tensor = synced(on_device)
        (outputs**3).sum().backward()
        return outputs

    outputs = cost("statistics", passes)
    assert isinstance(outputs, torch.Tensor)
    for _ in range(2):
        expected_outputs = whole(images)
    torch.testing.assert_close(outputs.cpu(), expected_outputs, rtol=1e-4, atol=1e-5)
    for name, buffer in synced.named_buffers():
        torch.testing.assert_close(buffer.cpu(), whole.get_buffer(name))
    dist.destroy_process_group()


main()
