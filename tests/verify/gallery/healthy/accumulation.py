"""Gradient accumulation with no_sync(), clipping and a warm-up by LambdaLR."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
gradient_accumulation_steps = 6
assert gradient_accumulation_steps % world_size == 0
gradient_accumulation_steps //= world_size
torch.manual_seed(1337)
tokens = torch.randint(0, 30, (96, 9), generator=torch.Generator().manual_seed(5))
dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
sampler = DistributedSampler(dataset, shuffle=True, seed=3)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = DDP(nn.Sequential(nn.Embedding(30, 16), nn.LayerNorm(16), nn.Linear(16, 30)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: min(1.0, (it + 1) / 5))
it = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for micro, (x, y) in enumerate(loader):
        last = (micro + 1) % gradient_accumulation_steps == 0
        with nullcontext() if last else model.no_sync():
            logits = model(x)
            loss = nn.functional.cross_entropy(logits.view(-1, 30), y.reshape(-1))
            loss = loss / gradient_accumulation_steps
            loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0 and it % 2 == 0:
                print(f"iter {it}: loss {loss.item() * gradient_accumulation_steps:.4f}")
            it += 1
dist.destroy_process_group()
