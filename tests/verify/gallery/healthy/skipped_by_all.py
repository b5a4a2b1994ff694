"""A batch with a bad loss on any rank is skipped by all: a flag, combined by its maximum."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(41)
x = torch.randn(72, 5)
x[31, 2] = float("inf")  # a broken record
dataset = TensorDataset(x, torch.where(x.isfinite(), x, 0).sum(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(3):
    sampler.set_epoch(epoch)
    skipped = 0
    for inputs, targets in loader:
        is_bad = (~inputs.isfinite().all()).int()
        dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        if is_bad:
            skipped += 1
            continue
        loss = nn.functional.mse_loss(model(inputs).squeeze(1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: {skipped} batch skipped")
dist.destroy_process_group()
