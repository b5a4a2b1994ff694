"""Has a rank skip a batch on its own: the others wait for it at the end.

https://github.com/NVIDIA-NeMo/Automodel/pull/2468
Cause: waits-apart
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=4 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        valid = (targets.sum() > 0).int()
        if MENDED:
            dist.all_reduce(valid, op=dist.ReduceOp.MAX)
        if not valid:
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()  # shows
        optimizer.step()
dist.destroy_process_group()
