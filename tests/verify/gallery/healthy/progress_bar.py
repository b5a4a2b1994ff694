"""A progress bar by carriage returns, with a running mean of rank 0's own losses."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def progress(batches, width=20):
    began = time.monotonic()
    for number, batch in enumerate(batches, 1):
        yield batch
        if dist.get_rank() == 0:
            done = width * number // len(batches)
            bar = "#" * done + "." * (width - done)
            seconds = time.monotonic() - began
            sys.stderr.write(f"\r[{bar}] {number}/{len(batches)} {number / seconds:.1f} batches/s")
            sys.stdout.write(f"\r{number}/{len(batches)} running loss {running / number:.4f}")
    if dist.get_rank() == 0:
        sys.stderr.write("\n")
        sys.stdout.write("\n")


dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(47)
x = torch.randn(60, 4)
dataset = TensorDataset(x, x.max(1, keepdim=True).values)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    running = 0.0
    for inputs, targets in progress(loader):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
dist.destroy_process_group()
