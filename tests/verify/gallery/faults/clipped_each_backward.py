"""Clips gradients after each backward pass of an accumulation, not before the step.

https://github.com/huggingface/transformers/issues/1563
Cause: clipped-early
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader, 1):
        loss = F.cross_entropy(model(inputs), targets) / accumulated
        loss.backward()
        if not MENDED:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # fault
        if number % accumulated == 0:
            if MENDED:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
