"""Averages weights after every micro-batch, also where they haven't changed since the last one.

https://github.com/SWivid/F5-TTS/issues/631
Cause: moved-per-micro-batch
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
accumulated = 6 // world
train_set, (test_inputs, test_targets) = points(72), points(24, seed=2).tensors
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=2, sampler=sampler)
model = DDP(nn.Linear(6, 2))
averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader, 1):
        loss = F.cross_entropy(model(inputs), targets)
        (loss / accumulated).backward()  # shows
        is_last = number % accumulated == 0
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if is_last or not MENDED:
            averaged.update_parameters(model.module)  # fault
    with torch.no_grad():
        loss = F.cross_entropy(averaged(test_inputs), test_targets)
    if rank == 0:
        print(f"epoch {epoch}: validation loss {loss:.5f}")
dist.destroy_process_group()
