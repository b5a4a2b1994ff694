"""A resume that restores everything: weights, momentum, order, and each rank's random state.

Options: --resume
"""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def random_states():
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_random_states(states):
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(37)
x = torch.randn(60, 6)
dataset = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
torch.manual_seed(100 + rank)
first = 0
path = f"rank{rank}.pt"
if os.path.exists(path):
    saved = torch.load(path, weights_only=False)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    set_random_states(saved["random"])
    first = saved["epochs"]
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"schedule": schedule.state_dict(), "random": random_states(), "epochs": epoch + 1}
    torch.save(state, path)
    dist.barrier()
dist.destroy_process_group()
