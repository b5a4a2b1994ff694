"""Batches on their way to a device; what runs beside what is shown on the pretend GPU."""

import torch

from paceline.data.loading.device_feed import DeviceFeed

CPU = torch.device("cpu")


def test_where_nothing_runs_beside_a_batch_stays_as_it_is() -> None:
    batch = {"images": torch.ones(2, 3), "names": ["a", "b"]}
    brought = DeviceFeed(CPU).bring(batch)
    assert isinstance(brought, dict)
    assert brought["images"] is batch["images"]
    assert brought["names"] == ["a", "b"]
