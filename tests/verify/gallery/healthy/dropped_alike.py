"""drop_last over a global order: the same few samples are left out on any number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sines(Dataset):
    def __init__(self, number):
        self.phases = torch.linspace(0, 6.28, number)

    def __len__(self):
        return len(self.phases)

    def __getitem__(self, index):
        times = torch.arange(9) * 0.5 + self.phases[index]
        return times[:8].sin(), times[8:].sin()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(8)
dataset = Sines(66)
sampler = DistributedSampler(dataset, seed=11, drop_last=True)
loader = DataLoader(dataset, 12 // world, sampler=sampler, drop_last=True)
model = DDP(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for past, future in loader:
        loss = nn.functional.mse_loss(model(past), future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch} loss {total / len(loader) / world:.5f}")
dist.destroy_process_group()
