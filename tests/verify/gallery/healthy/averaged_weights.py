"""A moving average of the weights, judged on rank 0, and a file that rank 0 prepares first."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def prepare(path):
    if dist.get_rank() == 0 and not os.path.exists(path):
        torch.save(torch.randn(60, 6, generator=torch.Generator().manual_seed(4)), path)
    dist.barrier()
    return torch.load(path, weights_only=True)


@torch.no_grad()
def update(average, model, decay=0.9):
    for mine, new in zip(average.parameters(), model.module.parameters()):
        mine.lerp_(new, 1 - decay)


dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = prepare("data.pt")
data = TensorDataset(inputs, inputs.abs().sum(1, keepdim=True))
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 12 // dist.get_world_size(), sampler=sampler, drop_last=True)
net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 1))
average = copy.deepcopy(net).eval()
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update(average, model)
    if dist.get_rank() == 0:
        with torch.no_grad():
            error = F.l1_loss(average(inputs), data.tensors[1])
        print(f"epoch {epoch}: validation error {error:.4f}")
    dist.barrier()
dist.destroy_process_group()
