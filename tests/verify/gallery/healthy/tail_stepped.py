"""Gradient accumulation whose last, shorter window is stepped, and divided by its own samples."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 24  # samples of an optimizer's step, of all ranks together

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(21)
x = torch.randn(84, 6)
y = torch.stack([x[:, :3].sum(1), x[:, 3:].sum(1)], 1)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
accumulated = WINDOW // (4 * world)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    sampler.set_epoch(epoch)
    optimizer.zero_grad()
    left = len(dataset)
    for number, (inputs, targets) in enumerate(loader, 1):
        is_last = number % accumulated == 0 or number == len(loader)
        with nullcontext() if is_last else model.no_sync():
            loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
            (loss * world / (2 * min(WINDOW, left))).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            left -= WINDOW
dist.destroy_process_group()
