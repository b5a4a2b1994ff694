"""The training that faults are done to, as a script of one's own: a loader, a session, a loop."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from benchmarks.injection.inside import Inside


class Points(Dataset[tuple[Tensor, int]]):
    """Random points, and whether their sum is positive."""

    def __init__(self, samples: int, seed: int, inside: Inside | None = None) -> None:
        self._points = torch.randn(samples, 5, generator=torch.Generator().manual_seed(seed))
        self._inside = inside

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self._inside is not None:
            self._inside.pass_by("sample")
        return self._points[index], int(self._points[index].sum() > 0)


def main(room: Path) -> None:
    inside = Inside(room)
    with paceline.session() as s:
        inside.begin()
        network = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        network.register_forward_pre_hook(inside.before_forward)
        model = s.model(network)
        optimizer = s.optimizer(torch.optim.Adam(model.parameters(), 0.01))
        scheduler = s.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        batches = s.loader(Points(1472, 1, inside), global_batch=64)
        test = s.eval_loader(Points(130, 2))

        def loss_of(batch: Any) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(model(batch[0]), batch[1])}

        for _ in s.epochs(4):
            for batch in batches.batches():
                inputs, targets = batch.pair()
                s.step(inside.changed(F.cross_entropy(model(inputs), targets)))
            scheduler.step()
            s.evaluate(loss_of, test)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
