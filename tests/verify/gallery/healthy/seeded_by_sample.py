"""Augmentation by torch's own functions, which the data set seeds by sample and epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Jittered(Dataset):
    epoch = 0

    def __init__(self, samples):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(samples, 6, generator=generator)
        self.targets = (self.inputs.sum(1) > 0).long()

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        torch.manual_seed(1000 * self.epoch + index)
        return self.inputs[index] + 0.1 * torch.randn(6), self.targets[index]


dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)
train_set = Jittered(72)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    train_set.epoch = epoch
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
