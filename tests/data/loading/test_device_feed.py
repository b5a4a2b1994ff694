"""Batches on their way to a device; what runs beside what is shown on the pretend GPU."""

import threading

import pytest
import torch

from paceline.data.loading.device_feed import DeviceFeed, one_ahead

CPU = torch.device("cpu")


def test_where_nothing_runs_beside_a_batch_stays_as_it_is() -> None:
    batch = {"images": torch.ones(2, 3), "names": ["a", "b"]}
    brought = DeviceFeed(CPU).bring(batch)
    assert isinstance(brought, dict)
    assert brought["images"] is batch["images"]
    assert brought["names"] == ["a", "b"]


def test_one_further_is_made_than_is_asked_for() -> None:
    made: list[int] = []
    threads: set[str] = set()

    def make(item: int) -> int:
        threads.add(threading.current_thread().name)
        made.append(item)
        return 10 * item

    results = one_ahead(make, range(5), CPU)
    assert next(results) == (0, 0)
    assert len(made) <= 2  # the second may still be under way
    assert list(results) == [(item, 10 * item) for item in range(1, 5)]
    assert made == list(range(5))
    assert threads == {"paceline-batches_0"}


def test_an_error_comes_where_its_item_would() -> None:
    def make(item: int) -> int:
        if item == 1:
            raise OSError("torn")
        return item

    results = one_ahead(make, range(3), CPU)
    assert next(results) == (0, 0)
    with pytest.raises(OSError, match="torn"):
        next(results)


def test_the_thread_ends_where_the_loop_is_left() -> None:
    results = one_ahead(str, range(5), CPU)
    assert next(results) == (0, "0")
    results.close()  # type: ignore[attr-defined]  # a generator
    assert not [t for t in threading.enumerate() if t.name.startswith("paceline-batches")]
