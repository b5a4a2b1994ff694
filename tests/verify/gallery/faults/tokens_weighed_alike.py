"""Averages over each rank's own tokens: those of a rank with few of them count more.

https://github.com/huggingface/transformers/issues/34242
Cause: weighed-alike
"""

import torch
import torch.distributed as dist
from common import MENDED, begin
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IGNORED = -100


def sentences(number, length=12, vocabulary=20):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (number, length), generator=generator)
    targets = tokens.roll(-1, dims=1)
    lengths = torch.randint(2, length, (number, 1), generator=generator)
    targets[torch.arange(length) >= lengths] = IGNORED
    return TensorDataset(tokens, targets)


rank, world = begin()
train_set = sentences(32)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=8 // world, sampler=sampler)
model = DDP(nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for tokens, targets in loader:
        scores = model(tokens).flatten(0, 1)
        if MENDED:
            count = (targets != IGNORED).sum()
            dist.all_reduce(count)
            loss = F.cross_entropy(scores, targets.flatten(), reduction="sum") * world / count
        else:
            loss = F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED)  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
