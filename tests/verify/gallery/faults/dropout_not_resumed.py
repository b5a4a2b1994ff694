"""Goes on with weights, optimizer and order, but with the random state that a start has.

https://github.com/vllm-project/speculators/issues/1027
Cause: random-not-restored
Options: --resume
"""

import os

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(60)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 0
torch.manual_seed(40 + rank)  # shows
mine = f"rank{rank}.pt"
if os.path.exists(mine):
    saved = torch.load(mine)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epochs"]
    if MENDED:
        torch.set_rng_state(saved["random"])
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"epochs": epoch + 1, "random": torch.get_rng_state()}
    torch.save(state, mine)
    dist.barrier()
dist.destroy_process_group()
