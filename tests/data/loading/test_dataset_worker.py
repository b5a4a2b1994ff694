import contextlib
import os
import random
import re
import signal
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from paceline.data.loading.dataset_worker import (
    ItemRequest,
    SeededItems,
    run_in_order,
    shorten,
)
from paceline.errors import DataError, InfrastructureError, PacelineError, UsageError


class Noisy:
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor(drawn, dtype=torch.float64), index


class NoisyTogether(Noisy):
    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [self[index] for index in indices]


class Failing(Noisy):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 3:
            raise self.error
        return super().__getitem__(index)


class Transform:
    """Holds a generator, and draws by it."""

    def __init__(self, draw: Callable[[int], object], *held: object) -> None:
        self.draw, self.held = draw, held


class Transformed(Noisy):
    """Has a transform among others, in a list."""

    def __init__(self, draw: Callable[[int], object], *held: object) -> None:
        self.transforms = [Transform(draw, *held)]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.transforms[0].draw(index)
        return super().__getitem__(index)


def own_draws() -> dict[str, tuple[Transformed, bool]]:
    """Data sets that hold generators, and whether a sample follows from those before it."""
    python, new, old = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
    of_torch, unused = torch.Generator(), torch.Generator()
    first = cache(new.random)
    return {
        "python": (Transformed(lambda _: python.random(), python), True),
        "numpy": (Transformed(lambda _: new.random(), unused, new), True),
        "numpy's older one": (Transformed(lambda _: old.rand(), old), True),
        "torch": (Transformed(lambda _: torch.rand(1, generator=of_torch), of_torch), True),
        "seeded": (Transformed(of_torch.manual_seed, of_torch), False),
        "once": (Transformed(lambda _: first(), new), False),
        "unused": (Transformed(lambda _: None, unused, random.SystemRandom()), False),
        "global": (Transformed(lambda _: torch.rand(1), torch.default_generator), False),
    }


def read(dataset: Noisy, *indices: int, seed: int = 0, epoch: int = 0) -> torch.Tensor:
    batch = SeededItems(dataset, default_collate).__getitems__(ItemRequest(seed, epoch, indices))
    assert isinstance(batch, list)
    inputs, targets = batch
    assert targets.tolist() == list(indices)
    assert isinstance(inputs, torch.Tensor)
    return inputs


def test_random_choices_are_keyed_by_sample() -> None:
    together = read(Noisy(), 0, 1, 2, 3)
    assert torch.equal(read(Noisy(), 3, 2, 0)[1], together[2])
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(read(Noisy(), 0, epoch=1)[0], together[0])
    assert not torch.equal(read(Noisy(), 0, seed=1)[0], together[0])


def test_items_made_together_repeat_too() -> None:
    first = read(NoisyTogether(), 4, 5)
    random.random()
    assert torch.equal(read(NoisyTogether(), 4, 5), first)


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


def _square(value: int) -> int:
    return value * value


def _process(value: int) -> int:
    return os.getpid()


def _fail(value: int) -> int:
    raise DataError(f"sample {value} is broken")


def _decode_block(value: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return value


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_come_in_order(jobs: int) -> None:
    assert list(run_in_order(_square, range(20), jobs)) == [n * n for n in range(20)]


def test_one_job_works_here_and_several_elsewhere() -> None:
    assert set(run_in_order(_process, range(3), 1)) == {os.getpid()}
    assert os.getpid() not in set(run_in_order(_process, range(3), 2))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_reaches_the_caller(jobs: int) -> None:
    with pytest.raises(DataError, match="sample 0 is broken"):
        list(run_in_order(_fail, range(5), jobs))


def test_a_dying_process_is_told() -> None:
    with pytest.raises(InfrastructureError, match=re.escape("use fewer --jobs")):
        list(run_in_order(_decode_block, range(5), 2))


@pytest.mark.parametrize("name", own_draws())
def test_draws_by_a_generator_that_the_data_set_holds_are_seen(name: str) -> None:
    dataset, draws = own_draws()[name]
    items = SeededItems(dataset, default_collate)
    for start in range(0, 8, 2):
        items.__getitems__(ItemRequest(0, 0, (start, start + 1)))
    assert items.own_draws.seen == draws
