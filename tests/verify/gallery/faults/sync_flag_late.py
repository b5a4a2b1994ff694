"""Sets require_backward_grad_sync after the forward pass, which has read it by then.

https://github.com/karpathy/build-nanogpt/pull/30
Cause: no-sync
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

MICRO_STEPS = 4

rank, world = begin()
train_set = points(64)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=4 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for step in range(len(loader) // MICRO_STEPS):
        optimizer.zero_grad()
        for micro_step in range(MICRO_STEPS):
            inputs, targets = next(batches)
            if MENDED:
                model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
            loss = F.cross_entropy(model(inputs), targets)  # shows
            loss = loss / MICRO_STEPS
            if not MENDED:
                model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
            loss.backward()
        optimizer.step()
dist.destroy_process_group()
