"""A number of steps rather than epochs: batches without end, validation every few steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


@torch.no_grad()
def validation_loss(model, loader):
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        total += torch.tensor([nn.functional.mse_loss(model(x), y, reduction="sum"), y.numel()])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
x = torch.rand(80, 4)
y = (x * torch.arange(4)).sum(1, keepdim=True)
sampler = DistributedSampler(range(60), seed=1)
loader = DataLoader(TensorDataset(x[:60], y[:60]), 12 // world, sampler=sampler)
held_out = DataLoader(TensorDataset(x[60 + rank :: world], y[60 + rank :: world]), 4)
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
batches = endless(loader, sampler)
for step in range(1, 9):
    inputs, targets = next(batches)
    loss = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        found = validation_loss(model, held_out)
        if rank == 0:
            print(f"step {step} val loss {found:.5f}")
dist.destroy_process_group()
