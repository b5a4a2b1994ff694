import contextlib
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, default_collate

from paceline.data.loading.dataset_worker import ItemRequest, SeededItems, shorten
from paceline.errors import DataError, PacelineError, UsageError


class Noisy:
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor(drawn, dtype=torch.float64), index


class Failing(Noisy):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 3:
            raise self.error
        return super().__getitem__(index)


def read(
    dataset: Noisy, *indices: int, seed: int = 0, epoch: int = 0, position: int = 0
) -> torch.Tensor:
    request = ItemRequest(seed, epoch, position, indices)
    batch = SeededItems(dataset, default_collate).__getitems__(request)
    assert isinstance(batch, list)
    inputs, targets = batch
    assert targets.tolist() == list(indices)
    assert isinstance(inputs, torch.Tensor)
    return inputs


def test_random_choices_are_keyed_by_the_position_in_the_order() -> None:
    together = read(Noisy(), 4, 1, 4, 3)
    assert torch.equal(read(Noisy(), 4, 3, position=2), together[2:])
    assert not torch.equal(together[0], together[2])  # a sample that is drawn twice differs
    assert not torch.equal(read(Noisy(), 4, epoch=1)[0], together[0])
    assert not torch.equal(read(Noisy(), 4, seed=1)[0], together[0])


def test_a_subset_reads_sample_by_sample() -> None:
    """torch's has `__getitems__`, which would draw for a whole batch at once."""
    subset: Subset[object] = Subset(Noisy(), [4, 1, 4, 3])  # type: ignore[arg-type]  # map-style
    batch = SeededItems(subset, default_collate).__getitems__(ItemRequest(0, 0, 0, (0, 1, 2, 3)))
    assert isinstance(batch, list)
    assert torch.equal(batch[0], read(Noisy(), 4, 1, 4, 3))


def numpy_state() -> list[int]:
    key = np.random.get_state(legacy=False)["state"]["key"]
    assert isinstance(key, np.ndarray)
    return [int(word) for word in key]


@pytest.mark.parametrize("dataset", [Noisy(), Failing(ValueError("broken"))])
def test_the_surrounding_generators_are_left_alone(dataset: Noisy) -> None:
    before = random.getstate(), numpy_state(), torch.get_rng_state()
    with contextlib.suppress(DataError):
        read(dataset, 1, 2, 3)
    assert random.getstate() == before[0]
    assert numpy_state() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_an_error_names_the_sample() -> None:
    with pytest.raises(DataError, match="failed at sample 3: KeyError: 'label'") as caught:
        read(Failing(KeyError("label")), 1, 3, 2)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_message_for_the_user_stays_as_it_is() -> None:
    with pytest.raises(PacelineError, match=r"^such a folder"):
        read(Failing(UsageError("such a folder")), 3)


def test_items_that_do_not_stack_are_named() -> None:
    class Ragged(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(index), index

    with pytest.raises(DataError, match=r"no batch can be made of the samples 1, 2: RuntimeError"):
        read(Ragged(), 1, 2)


def test_shorten() -> None:
    assert shorten([1, 2, 3]) == "1, 2, 3"
    assert shorten(range(100), most=2) == "0, 1 … (100 in all)"
