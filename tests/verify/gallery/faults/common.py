"""What all scripts here begin with."""

import sys

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

MENDED = "--mended" in sys.argv


def begin():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def points(samples, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())
