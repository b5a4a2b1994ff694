"""Draws each sample's noise from generators that all ranks have seeded alike.

https://github.com/PaddlePaddle/PaddleClas/pull/2497
Cause: same-augmentation
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    def __init__(self, kept):
        self.kept = kept

    def __len__(self):
        return len(self.kept)

    def __getitem__(self, index):
        inputs, target = self.kept[index]
        return inputs + 0.1 * torch.randn(6), target


rank, world = begin()
train_set = Noisy(points(64))
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
torch.manual_seed(7 + rank if MENDED else 7)  # fault
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
