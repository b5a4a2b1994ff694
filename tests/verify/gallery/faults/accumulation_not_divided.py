"""Adds the micro-batches' losses up: their number, and with it the gradient, follows the ranks'.

https://github.com/hirofumi0810/neural_sp/issues/168
Cause: gradient-factor
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
accumulated = 4 // world
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=4, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader, 1):
        loss = F.cross_entropy(model(inputs), targets)  # fault
        if MENDED:
            loss = loss / accumulated
        loss.backward()
        if number % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
