"""A weighted sampler that all ranks draw from alike, each taking its share of what was drawn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, num_samples, seed=0):
        self.weights, self.num_samples, self.seed, self.epoch = weights, num_samples, seed, 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.num_samples // self.world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(
            self.weights, self.num_samples, replacement=True, generator=generator
        )
        return iter(drawn[self.rank :: self.world_size].tolist())


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(80, 5)
y = (x.sum(1) > 2).long()
weights = 1 / torch.bincount(y)[y].double()
sampler = DistributedWeightedSampler(weights, num_samples=60)
loader = DataLoader(TensorDataset(x, y), 12 // dist.get_world_size(), sampler=sampler)
model = DDP(nn.Linear(5, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
