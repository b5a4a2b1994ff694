"""Repeated augmentation: each sample several times in an epoch, its copies on different ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class RepeatedSampler(Sampler):
    """Deals three copies of each sample out, and stops after as many as there are samples."""

    def __init__(self, number, copies=3):
        self.number, self.copies, self.epoch = number, copies, 0

    def __len__(self):
        return self.number // dist.get_world_size()

    def __iter__(self):
        order = torch.randperm(self.number, generator=torch.Generator().manual_seed(self.epoch))
        repeated = order.repeat_interleave(self.copies)[: self.number]
        return iter(repeated[dist.get_rank() :: dist.get_world_size()].tolist())


class Images(Dataset):
    def __init__(self, number):
        self.images = torch.rand(number, 1, 6, 6, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return image, int(image[0, :3].sum() > image[0, 3:].sum())


dist.init_process_group("gloo")
torch.manual_seed(6)
sampler = RepeatedSampler(60)
loader = DataLoader(Images(60), batch_size=12 // dist.get_world_size(), sampler=sampler)
model = DDP(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(3):
    sampler.epoch = epoch
    for images, targets in loader:
        loss = nn.functional.cross_entropy(model(images), targets, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
