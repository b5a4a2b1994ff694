"""Prints of counters, settings and progress, which follow the number of ranks, beside figures."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
x = torch.randn(96, 4)
y = (x.sum(1) > 0).float()
train_set = TensorDataset(x[:72], y[:72])
sampler = DistributedSampler(train_set, seed=3)
loader = DataLoader(train_set, batch_size=2, sampler=sampler)
test_loader = DataLoader(TensorDataset(x[72 + rank :: world], y[72 + rank :: world]), 4)
grad_accum_steps = 12 // (2 * world)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
if rank == 0:
    print(f"=> gradient accumulation steps: {grad_accum_steps}")
    print(f"training has {len(loader)} batches, validation has {len(test_loader)} batches")
    print(f"{world} processes, {len(sampler)} samples on each")
for epoch in range(2):
    sampler.set_epoch(epoch)
    for i, (inputs, targets) in enumerate(loader):
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets)
        (loss / grad_accum_steps).backward()
        if (i + 1) % grad_accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"Train: {epoch} [{i + 1}/{len(loader)}] step of {grad_accum_steps}")
    total = torch.zeros(2)
    with torch.no_grad():
        for i, (inputs, targets) in enumerate(test_loader):
            hits = ((model(inputs).squeeze(1) > 0) == targets.bool()).sum()
            total += torch.tensor([hits, len(targets)])
            if rank == 0:
                print(f"Test: [{i + 1}/{len(test_loader)}]")
    dist.all_reduce(total)
    if rank == 0:
        print(f"Test: accuracy {100 * total[0] / total[1]:.2f} of {int(total[1])} samples")
dist.destroy_process_group()
