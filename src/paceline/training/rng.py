"""Random generators seeded anew from (seed, step, worker), so that no state is saved."""

import random
from typing import final

import numpy as np
import torch

from paceline.data.splitmix import Domain, derive_key, mix64
from paceline.distributed.device import default_generator, is_accelerator

_SEED_PYTHON = super(random.Random, random._inst).seed
_CPU_SEED_MASK = 0xFFFFFFFF  # the CPU generator (mt19937) takes in 32 bits


def seed_everything(seed: int) -> None:
    """Seed the default generators of Python, NumPy and torch alike on every worker.

    So that a recipe builds the same weights everywhere, also where it draws from several of them.
    """
    _seed_defaults(derive_key(Domain.WEIGHTS, seed))


def seed_before_session(seed: int) -> None:
    """Seed the same generators before a script's first line, alike on every worker and resume.

    So that data which it shuffles or splits before its session are the same everywhere. The key
    has 32 bits, as a seed that somebody gave: see `has_drawn_unseeded`.

    Args:
        seed: What the command line gives: the script's own isn't known before it runs.
    """
    _seed_defaults(derive_key(Domain.SCRIPT, seed) & _CPU_SEED_MASK)


def _seed_defaults(key: int) -> None:
    random.seed(key)
    np.random.seed(key & _CPU_SEED_MASK)  # user code draws from NumPy's old generator
    torch.manual_seed(key)


def has_drawn_unseeded() -> bool:
    """Tell whether torch has drawn random numbers in this process without a given seed.

    Without one torch takes 64 random bits, of which the upper half is never zero in practice, and
    seeds that are given have no more than 32 as a rule.
    """
    seed = torch.initial_seed()
    fresh = torch.Generator().manual_seed(seed)
    return seed > _CPU_SEED_MASK and not torch.equal(fresh.get_state(), torch.get_rng_state())


def step_key(seed: int, rank: int) -> int:
    """Derive what `step_seed` starts from, once a training."""
    return derive_key(Domain.STEP, seed, rank)


def step_seed(key: int, step: int) -> int:
    """Derive the seed of one worker's random numbers in one step, 0 … 2**32-1."""
    return mix64(key ^ step) & _CPU_SEED_MASK


def generators(device: torch.device) -> list[torch.Generator]:
    """List the default generators that a model on `device` draws from."""
    listed = [torch.default_generator]
    if is_accelerator(device):
        listed.append(default_generator(device))
    return listed


@final
class RandomStreams:
    """One worker's default generators, set anew at every step and epoch."""

    def __init__(self, seed: int, rank: int, device: torch.device) -> None:
        """Create the random streams.

        Args:
            seed: The training's.
            rank: This worker.
            device: Where the model draws random numbers, besides the CPU.
        """
        self._seed = seed
        self._key = step_key(seed, rank)
        self._shard_keys: dict[int, int] = {}
        self._epoch_key = derive_key(Domain.EPOCH, seed)
        self._generators = generators(device)

    def at_step(self, step: int) -> None:
        """Seed for a step: other numbers on every worker, the same after a resume."""
        seed = step_seed(self._key, step)
        for generator in self._generators:
            generator.manual_seed(seed)

    def at_shard(self, step: int, shard: int) -> None:
        """Seed for a shard of a step, Python's and NumPy's generators as well.

        As many shards as workers have the same numbers as `at_step` gives these workers.
        """
        if shard not in self._shard_keys:
            self._shard_keys[shard] = step_key(self._seed, shard)
        self._seed_all(step_seed(self._shard_keys[shard], step))

    def at_epoch(self, epoch: int) -> None:
        """Seed for what a script draws between epochs: the same numbers on every worker."""
        self._seed_all(step_seed(self._epoch_key, epoch))

    def _seed_all(self, seed: int) -> None:
        # What `random.seed` comes to for a whole number, at a third of its time beside a training.
        _SEED_PYTHON(seed)
        random._inst.gauss_next = None  # type: ignore[attr-defined]  # not declared
        np.random.seed(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
