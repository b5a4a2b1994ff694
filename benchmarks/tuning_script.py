"""A script as its author has it, for five jobs: what `benchmarks.tuning` tunes beside recipes.

    paceline run benchmarks/tuning_script.py --workers 2 -- JOB [DATA]

Models, optimizers and data are those of PyTorch's examples (MNIST, word language model, ImageNet's
image folder), of nanoGPT and of scripts for CIFAR-10, in sizes for a CPU.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paceline
from benchmarks.peer_loops import JOBS as PEERS
from benchmarks.peer_loops import WORKERS, Work

_WORDS, _TIMES = 2_000, 35


class WordModel(nn.Module):
    """An LSTM of two layers over words; (N, T) to (N * T, words)."""

    def __init__(self, width: int = 200) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.decoder = nn.Linear(width, _WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Score the next word at each place."""
        found, _ = self.lstm(self.embedding(words))
        scores: Tensor = self.decoder(found).flatten(0, 1)
        return scores


def _words(_data: Path) -> Work:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(_WORDS, (4_000, _TIMES + 1), generator=generator)
    data = TensorDataset(text[:, :-1], text[:, 1:])
    return Work(
        model=WordModel,
        optimizer=lambda parameters: SGD(parameters, lr=1.0),
        loss=lambda scores, targets: F.cross_entropy(scores, targets.flatten()),
        data=lambda: data,
        batch=10,
        steps=len(data) // (10 * WORKERS),
        in_memory=lambda: (data, ()),
    )


def _photos(data: Path) -> Work:
    from torchvision import models, transforms
    from torchvision.datasets import ImageFolder

    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(64),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    folder = ImageFolder(str(data / "train"), transform)
    return Work(
        model=lambda: models.resnet18(num_classes=len(folder.classes)),
        optimizer=lambda parameters: SGD(parameters, 0.01, momentum=0.9, weight_decay=1e-4),
        loss=F.cross_entropy,
        data=lambda: folder,
        batch=16,
        steps=len(folder) // (16 * WORKERS),
        in_memory=lambda: (folder, ()),
    )


def _of_peers(name: str) -> Callable[[Path], Work]:
    make, samples = PEERS[name]
    return lambda _data: make(samples)


JOBS: Mapping[str, Callable[[Path], Work]] = {
    "mnist": _of_peers("mnist"),
    "cifar": _of_peers("wideresnet"),
    "nanogpt": _of_peers("transformer"),
    "words": _words,
    "photos": _photos,
}


def main(job: str, data: str = ".") -> None:
    """Train a job for many epochs: a trial ends by its time."""
    s = paceline.session()
    torch.manual_seed(0)
    work = JOBS[job](Path(data))
    net = work.model()
    loader: Any = DataLoader(work.data(), work.batch * WORKERS, shuffle=True, drop_last=True)
    model, optimizer, loader = s.prepare(net, work.optimizer(net.parameters()), loader)
    for _ in s.epochs(1000):
        for inputs, targets in loader:
            optimizer.zero_grad()
            s.backward(work.loss(model(inputs), targets))
            optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
