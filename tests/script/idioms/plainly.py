"""Runs a plain script with the chance of a session on one worker, and saves its weights.

What a step computes is the script's and PyTorch's alone. Only the order of samples, and the random
numbers of each sample and step, are those that a session has.

    python -m tests.script.idioms.plainly WEIGHTS.safetensors SCRIPT.py [ARGUMENTS]
"""

import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SequentialSampler, default_collate

from paceline.data.loading.dataset_worker import ItemRequest, SeededItems
from paceline.data.order import epoch_order
from paceline.training.rng import RandomStreams, seed_everything

SEED = 0
WINDOWS = 31 * 2 * 8
"""nanoGPT's script trains on as many windows of its file."""


class Chance:
    """Stands for what a DataLoader and `torch.randint` draw."""

    def __init__(self) -> None:
        self._streams = RandomStreams(SEED, 0, torch.device("cpu"))
        self._passes: dict[int, int] = {}
        self._drawn = 0
        self._iterate, self._randint = DataLoader.__iter__, torch.randint

    def batches(self, loader: DataLoader[object]) -> Iterator[object]:
        """Give the batches of one pass."""
        if isinstance(loader.sampler, SequentialSampler):
            yield from self._iterate(loader)
            return
        epoch, data = self._passes.setdefault(id(loader), 0), loader.dataset
        items = SeededItems(data, default_collate)  # type: ignore[arg-type]  # it is map-style
        order = epoch_order(len(data), SEED, epoch).tolist()  # type: ignore[arg-type]  # likewise
        size = loader.batch_size or 1
        for start in range(0, len(order), size):
            batch = items.__getitems__(
                ItemRequest(SEED, epoch, start, tuple(order[start : start + size]))
            )
            self._streams.at_step(epoch * len(loader) + start // size)
            yield batch
        self._passes[id(loader)] += 1  # not where only the first batch was looked at

    def randint(self, *given: Any, **named: Any) -> Tensor:
        """Draw where windows begin as a data set does that is asked for one at a time."""
        if named or given[1:] != ((8,),) or not torch.is_grad_enabled():
            return self._randint(*given, **named)
        order = epoch_order(WINDOWS, SEED, 0).tolist()
        first = self._drawn % WINDOWS
        asked = tuple(order[(first + i) % WINDOWS] for i in range(8))
        self._drawn += 8
        items = SeededItems(_Draws(lambda: self._randint(given[0], (1,))), torch.cat)  # type: ignore[arg-type]
        return items.__getitems__(ItemRequest(SEED, 0, first, asked))  # type: ignore[return-value]


class _Draws:
    def __init__(self, draw: Callable[[], Tensor]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return WINDOWS

    def __getitem__(self, index: int) -> Tensor:
        return self._draw()


def main() -> None:
    path, script, *arguments = sys.argv[1:]
    chance, trained = Chance(), dict[nn.Module, None]()

    def note(module: nn.Module, inputs: object) -> None:
        if module.training and torch.is_grad_enabled():
            trained[module] = None

    register_module_forward_pre_hook(note)
    DataLoader.__iter__ = lambda loader: chance.batches(loader)  # type: ignore[method-assign, assignment, return-value]
    torch.randint = chance.randint
    seed_everything(SEED)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    save_file(tensors_of([module for module in trained if list(module.parameters())]), path)


def tensors_of(modules: list[nn.Module]) -> dict[str, Tensor]:
    """Name the tensors of all modules that are no part of another, as `NUMBER/NAME`."""
    parts = {part for module in modules for part in module.children()}
    parts |= {p for part in parts for p in part.modules()}
    roots = [module for module in modules if module not in parts]
    roots = [
        module.module if isinstance(module, DistributedDataParallel) else module for module in roots
    ]
    return {
        f"{number}/{name}": tensor.clone()
        for number, root in enumerate(roots)
        for name, tensor in root.state_dict().items()
    }


if __name__ == "__main__":
    main()
