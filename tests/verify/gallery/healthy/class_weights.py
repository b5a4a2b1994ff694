"""Class weights from the whole training set, and a loss divided by all ranks' weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(19)
x = torch.randn(72, 6)
y = torch.bucketize(x[:, 0] + x[:, 1], torch.tensor([-1.0, 1.5]))
class_weights = len(y) / (3 * torch.bincount(y, minlength=3).float())
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    shown = torch.zeros(2)
    for inputs, targets in loader:
        total = class_weights[targets].sum()
        dist.all_reduce(total)
        loss = F.cross_entropy(model(inputs), targets, weight=class_weights, reduction="sum")
        optimizer.zero_grad()
        (loss * world / total).backward()
        optimizer.step()
        shown += torch.stack([loss.detach(), class_weights[targets].sum()])
    dist.all_reduce(shown)
    if rank == 0:
        print(f"epoch {epoch} weighted loss {shown[0] / shown[1]:.5f}")
dist.destroy_process_group()
