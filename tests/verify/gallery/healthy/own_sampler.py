"""A batch sampler of its own, which orders by length and gives each rank its part of a batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self, number):
        generator = torch.Generator().manual_seed(2)
        self.lengths = torch.randint(3, 9, (number,), generator=generator).tolist()
        self.words = torch.randint(1, 50, (number, 9), generator=generator)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        words = self.words[index].clone()
        words[self.lengths[index] :] = 0
        return words, words.sum() % 2


class BucketBatchSampler:
    def __init__(self, lengths, batch_size, rank, world, seed=0):
        self.lengths, self.batch_size = lengths, batch_size
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.batch_size

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        for number in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[number][self.rank :: self.world]


dist.init_process_group("gloo")
torch.manual_seed(0)
data = Sentences(60)
sampler = BucketBatchSampler(data.lengths, 6, dist.get_rank(), dist.get_world_size())
loader = DataLoader(data, batch_sampler=sampler)
model = DDP(nn.Sequential(nn.EmbeddingBag(50, 8, padding_idx=0), nn.Linear(8, 2)))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for words, labels in loader:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(words), labels).backward()
        optimizer.step()
dist.destroy_process_group()
