import random

import numpy as np
import torch

from paceline.training.rng import (
    RandomStreams,
    generators,
    has_drawn_unseeded,
    seed_before_session,
    seed_everything,
    step_key,
    step_seed,
)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_the_seed_settles_all_three_generators() -> None:
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_script_begins_with_numbers_of_its_own_that_count_as_seeded() -> None:
    seed_everything(3)
    session = draw()
    seed_before_session(3)
    first = draw()
    assert not has_drawn_unseeded()
    seed_before_session(3)
    assert draw() == first
    assert all(a != b for a, b in zip(draw(), session, strict=True))
    torch.seed()
    draw()
    assert has_drawn_unseeded()
    seed_before_session(4)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_every_step_and_worker_has_numbers_of_its_own() -> None:
    seeds = {
        step_seed(step_key(seed, rank), step)
        for seed in range(3)
        for rank in range(4)
        for step in range(50)
    }
    assert len(seeds) == 3 * 4 * 50
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_a_step_seed_never_changes_between_versions() -> None:
    assert step_seed(step_key(0, 0), 0) == 1343007470
    assert step_seed(step_key(7, 3), 1000) == 4193898597


def test_a_shards_numbers_are_those_of_its_seed() -> None:
    streams = RandomStreams(5, 0, torch.device("cpu"))
    random.gauss()  # keeps a second number for the next call
    streams.at_shard(7, 1)
    drawn = (random.gauss(), *draw())
    seed = step_seed(step_key(5, 1), 7)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    assert (random.gauss(), *draw()) == drawn


def test_a_cpu_model_draws_from_one_generator() -> None:
    assert generators(torch.device("cpu")) == [torch.default_generator]
