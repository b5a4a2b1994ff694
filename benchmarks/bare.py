"""A torchrun script that does the mnist job by hand; `startup` and `memory` measure against it.

torchrun --nproc-per-node 2 -m benchmarks.bare --data-dir DIR --stamps DIR [--article]

By default it is as lean and as fast as by hand it can be: it reads the IDX files with NumPy, keeps
the tensors in memory, and sets DDP up as `loops.tuned_loop` does. With --article it uses
torchvision's MNIST and a DataLoader.
"""

import argparse
import inspect
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.stamps import stamp_steps

BATCH = 64
MEAN, STD = 0.1307, 0.3081


class Net(nn.Module):
    """The network of a DDP article."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1600, 128),
            nn.ReLU(inplace=True),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Classify: (N, 1, 28, 28) to log-probabilities (N, 10)."""
        return F.log_softmax(self.layers(images), dim=1)


def main() -> None:
    """Train one epoch and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--article", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stamp_steps(arguments.stamps)
    run = _article if arguments.article else _lean
    run(arguments.data_dir, arguments.samples or None)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of torch 2.15 now and then abort the process while it ends


def _lean(data_dir: Path, samples: int | None) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    raw = data_dir / "MNIST" / "raw"
    images = _idx(raw / "train-images-idx3-ubyte", 16).view(-1, 28, 28, 1)[:samples]
    labels = _idx(raw / "train-labels-idx1-ubyte", 8).long()[:samples]
    test_images = _idx(raw / "t10k-images-idx3-ubyte", 16).view(-1, 28, 28, 1)[:samples]
    test_labels = _idx(raw / "t10k-labels-idx1-ubyte", 8).long()[:samples]
    model = Net().to(memory_format=torch.channels_last)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    net = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        **{buffers: False},  # type: ignore[arg-type]  # its name depends on torch's version
    )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.01, foreach=True)
    order = torch.randperm(len(images))
    for picked in order.split(BATCH * world_size):
        own = picked.chunk(world_size)[rank]
        loss = F.nll_loss(net(_prepared(images[own])), labels[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    own_test = slice(rank, None, world_size)
    batches = zip(
        test_images[own_test].split(BATCH), test_labels[own_test].split(BATCH), strict=True
    )
    _evaluate(model, [(_prepared(x), y) for x, y in batches])


def _article(data_dir: Path, samples: int | None) -> None:
    from torch.utils.data import DataLoader, Subset
    from torch.utils.data.distributed import DistributedSampler
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    sets = [datasets.MNIST(str(data_dir), train=t, transform=transform) for t in (True, False)]
    train, test = (Subset(s, range(min(samples or len(s), len(s)))) for s in sets)
    loaders = [
        DataLoader(s, batch_size=BATCH, sampler=DistributedSampler(s)) for s in (train, test)
    ]
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.Adadelta(net.parameters(), lr=0.01)
    for x, y in loaders[0]:
        optimizer.zero_grad()
        F.nll_loss(net(x), y).backward()
        optimizer.step()
    _evaluate(net.module, list(loaders[1]))


@torch.no_grad()
def _evaluate(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    model.eval()
    sums = torch.zeros(2)
    for x, y in batches:
        sums += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    dist.all_reduce(sums)
    if dist.get_rank() == 0:
        print(f"accuracy {sums[0] / sums[1]:.2%} of {int(sums[1])}, pid {os.getpid()}", flush=True)


def _prepared(raw: Tensor) -> Tensor:
    return raw.mul(1 / (255 * STD)).add_(-MEAN / STD).permute(0, 3, 1, 2)


def _idx(path: Path, header: int) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8, offset=header))


if __name__ == "__main__":
    main()
