"""Gradients clipped once a step, when all micro-batches of all ranks are in them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(31)
micro_batch, batch = 2, 12
x = torch.randn(72, 3, 5)
dataset = TensorDataset(x, x.mean((1, 2)) * 5)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=micro_batch, sampler=sampler)
micro_batches = batch // (micro_batch * world)
model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(15, 20), nn.ELU(), nn.Linear(20, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    batches = iter(loader)
    for step in range(len(loader) // micro_batches):
        for micro_step in range(micro_batches):
            model.require_backward_grad_sync = micro_step == micro_batches - 1
            inputs, targets = next(batches)
            loss = nn.functional.smooth_l1_loss(model(inputs).squeeze(1), targets)
            (loss / micro_batches).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.05)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} step {step} norm {norm:.5f}")
dist.destroy_process_group()
