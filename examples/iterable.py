"""A script of your own on a stream: samples that can only be read from the beginning.

python examples/iterable.py
paceline run examples/iterable.py --workers 2
"""

import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import IterableDataset

import paceline


class Lines(IterableDataset):
    """Gives x and 3 x - 1 with noise; the same samples in the same order on every worker."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Be told which epoch begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Read the stream; seeded, since random numbers must not differ between workers."""
        source = random.Random(self.epoch)
        for _ in range(5000):
            x = source.uniform(-1, 1)
            yield {"x": torch.tensor([x]), "y": torch.tensor([3 * x - 1 + source.gauss(0, 0.1)])}


def main() -> None:
    """Fit a line."""
    with paceline.session() as s:
        model = s.model(nn.Linear(1, 1))
        s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = s.loader(Lines(), global_batch=64)
        for _ in s.epochs(2):
            for batch in batches:
                s.step((model(batch["x"]) - batch["y"]).square().mean())
            s.log(slope=model.weight.item(), offset=model.bias.item())


if __name__ == "__main__":
    main()
