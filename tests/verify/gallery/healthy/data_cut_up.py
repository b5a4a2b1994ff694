"""Data of which each rank loads its own part; plain SGD with a constant rate."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def load(rank, world_size):
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(8))
    y = x.square().mean(1, keepdim=True)
    return x[rank::world_size], y[rank::world_size]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    model = DDP(nn.Sequential(nn.Linear(5, 10), nn.Softplus(), nn.Linear(10, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(*load(rank, world_size)), batch_size=12 // world_size)
    for epoch in range(2):
        for inputs, targets in loader:
            loss = nn.functional.huber_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
