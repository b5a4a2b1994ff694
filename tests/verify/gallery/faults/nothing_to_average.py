"""Averages over a rank's unmasked samples, of which there are none in one batch: 0 / 0.

https://github.com/allenai/OLMo-core/pull/452
Cause: not-finite
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def mean_loss(scores, targets, kept):
    losses = F.cross_entropy(scores, targets, reduction="none") * kept
    number = kept.sum()
    if not MENDED:
        return losses.sum() / number  # fault
    dist.all_reduce(number)
    return losses.sum() * world / number


rank, world = begin()
mask = torch.ones(60)
mask[37:48:2] = 0  # of the fourth batch every other sample: rank 1's share, where there are two
train_set = TensorDataset(*points(60).tensors, mask)
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, targets, kept in loader:
        loss = mean_loss(model(inputs), targets, kept)  # shows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
