"""Tells the data set the epoch, of which its persistent readers have copies: all hear of the first.

https://github.com/starVLA/starVLA/issues/470
Cause: epoch-ignored
"""

import torch
import torch.distributed as dist
from common import MENDED, begin
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Mixture(Dataset):
    """Draws another sample in each epoch, by epoch and index."""

    epoch = 0

    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.epoch + index)
        inputs = torch.randn(6, generator=generator)
        return inputs, (inputs.sum() > 0).long()


if __name__ == "__main__":
    rank, world = begin()
    train_set = Mixture()
    sampler = DistributedSampler(train_set)
    readers = {"num_workers": 1, "persistent_workers": not MENDED}  # fault
    loader = DataLoader(train_set, 12 // world, sampler=sampler, **readers)  # shows
    model = DDP(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        train_set.epoch = epoch
        for inputs, targets in loader:  # shows
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()
