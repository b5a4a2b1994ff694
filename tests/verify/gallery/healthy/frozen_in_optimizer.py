"""An optimizer over all parameters, frozen ones among them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tagger(nn.Module):
    def __init__(self, words, tags):
        super().__init__()
        self.embedding = nn.Embedding(words, 8)
        self.embedding.weight.requires_grad_(False)
        self.encoder = nn.GRU(8, 16, batch_first=True)
        self.head = nn.Linear(16, tags)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens))[0])


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
tokens = torch.randint(0, 30, (60, 7))
dataset = TensorDataset(tokens, tokens % 4)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler)
model = DDP(Tagger(30, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for words, tags in loader:
        scores = model(words)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
