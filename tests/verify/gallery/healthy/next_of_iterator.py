"""Batches without end by iter() and next(), which begins the loader again where it has ended."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(23)
x = torch.randn(60, 4)
dataset = TensorDataset(x, x.flip(1).cumsum(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 13)
epoch = 0
batches = iter(loader)
for step in range(13):
    try:
        inputs, targets = next(batches)
    except StopIteration:
        epoch += 1
        sampler.set_epoch(epoch)
        batches = iter(loader)
        inputs, targets = next(batches)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    schedule.step()
dist.destroy_process_group()
