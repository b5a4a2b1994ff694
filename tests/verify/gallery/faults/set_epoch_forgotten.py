"""Never tells the sampler which epoch it is: each has the order of the first.

https://github.com/huggingface/transformers/issues/4398
Cause: set-epoch
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
loader = DataLoader(
    train_set, batch_size=16 // world, sampler=DistributedSampler(train_set, shuffle=True)
)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    if MENDED:
        loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:  # fault
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
