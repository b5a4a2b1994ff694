"""A torchrun script that does the mnist job by hand; `startup` measures against it.

torchrun --nproc-per-node 2 -m benchmarks.bare --data-dir DIR --stamps DIR --samples N

It is as lean and as fast as by hand it can be: it reads the IDX files with NumPy, and keeps the
tensors in memory.
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
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.stamps import stamp_steps
from paceline.models.mnist_cnn import MnistCnn

BATCH = 64
MEAN, STD = 0.1307, 0.3081


def main() -> None:
    """Read all four files, and train on the first samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--stamps", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stamp_steps(arguments.stamps)
    raw = arguments.data_dir / "MNIST" / "raw"
    (images, labels), _ = (
        (_idx(raw / f"{part}-images-idx3-ubyte", 16), _idx(raw / f"{part}-labels-idx1-ubyte", 8))
        for part in ("train", "t10k")
    )
    _train(images.view(-1, 28, 28, 1)[: arguments.samples], labels.long()[: arguments.samples])
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of torch 2.15 now and then abort the process while it ends


def _train(images: Tensor, labels: Tensor) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = MnistCnn().to(memory_format=torch.channels_last)
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
        inputs = images[own].mul(1 / (255 * STD)).add_(-MEAN / STD).permute(0, 3, 1, 2)
        F.nll_loss(net(inputs), labels[own]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _idx(path: Path, header: int) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8, offset=header))


if __name__ == "__main__":
    main()
