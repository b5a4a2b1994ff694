"""Seeds all ranks alike at the start: their reader processes change other samples in the same way.

https://github.com/huggingface/transformers/issues/37932
Cause: same-augmentation
"""

import torch
import torch.distributed as dist
from common import MENDED, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Masked(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, target = self.samples[index]
        return inputs * (torch.rand(6) > 0.2), target


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # fault
    model = DDP(nn.Linear(6, 2))
    if MENDED:
        torch.manual_seed(100 + rank)
    train_set = Masked(points(60))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler, num_workers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()
