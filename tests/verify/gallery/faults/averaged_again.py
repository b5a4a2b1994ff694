"""Divides by the tokens of all ranks, and leaves DistributedDataParallel's mean on as well.

https://github.com/pytorch/torchtitan/pull/2323
Cause: gradient-factor
"""

import torch
import torch.distributed as dist
from common import MENDED, begin
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


def added_up(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


rank, world = begin()
sentences = torch.randint(0, 20, (32, 9), generator=torch.Generator().manual_seed(1))
sampler = DistributedSampler(sentences)
loader = DataLoader(sentences, batch_size=8 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)))
if MENDED:
    model.register_comm_hook(None, added_up)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for tokens in loader:
        labels = tokens[:, 1:].flatten()
        number = torch.tensor(labels.numel())
        dist.all_reduce(number)
        scores = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(scores, labels, reduction="sum") / number  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
