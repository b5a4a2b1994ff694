"""Layers that are computed again in the backward pass, and a branch for each second micro-batch."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(12, 2), nn.Linear(12, 2)])

    def forward(self, x, head):
        hidden = checkpoint(self.middle, self.first(x).relu(), use_reentrant=False)
        return self.heads[head](hidden)


def main(rank, world):
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=6 // world, sampler=sampler)
    model = DDP(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            with model.no_sync() if number % 2 == 0 else nullcontext():
                loss = nn.functional.cross_entropy(model(inputs, number % 2), targets)
                (loss / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
