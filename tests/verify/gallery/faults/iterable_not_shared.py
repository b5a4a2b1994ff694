"""Streams the same samples on every rank: an iterable data set knows of none.

https://github.com/huggingface/datasets/issues/5360
Cause: no-sampler
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, kept):
        self.kept = kept

    def __iter__(self):
        first, every = (rank, world) if MENDED else (0, 1)
        for index in range(first, len(self.kept), every):
            yield self.kept[index]


rank, world = begin()
loader = DataLoader(Stream(points(64)), batch_size=16 // world)  # shows
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
