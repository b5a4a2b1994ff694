"""Keeps each rank's own buffers: they are judged by other ones than are saved.

https://github.com/open-mmlab/mmdetection/issues/2539
Cause: buffers-apart
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Center(nn.Module):
    """Takes off the running mean of what it has seen, which it learns from its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, inputs):
        if self.training:
            seen = inputs.mean(0)
            if MENDED:
                dist.all_reduce(seen)
                seen = seen / world
            self.mean = 0.9 * self.mean + 0.1 * seen
        return inputs - self.mean.detach() if not self.training else inputs


rank, world = begin()
train_set, test_set = points(64), points(16, seed=2)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Sequential(Center(), nn.Linear(6, 2)), broadcast_buffers=False)  # fault
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for inputs, _ in DataLoader(test_set, batch_size=16):
            model(inputs)
dist.destroy_process_group()
