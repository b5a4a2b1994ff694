"""Skips a batch where rank 0's loss is too large; a spike on another rank goes into the weights.

https://github.com/ecmwf/WeatherGenerator/pull/2718
Cause: decided-by-one
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(60)
train_set.tensors[0][25] *= 1000  # in the third batch: rank 1's, where there is one
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
skipped = 0
for epoch in range(2):
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs).squeeze(1), targets.float())
        is_spike = (loss.detach() > 50).int()
        if MENDED:
            dist.all_reduce(is_spike, op=dist.ReduceOp.MAX)
        else:
            dist.broadcast(is_spike, src=0)  # fault
        if is_spike:
            skipped += 1
            continue  # shows
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
