"""A generator and a discriminator with two optimizers; noise drawn by sample."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(2, generator=generator) * 0.5 + 2, torch.randn(4, generator=generator)


dist.init_process_group("gloo")
torch.manual_seed(0)
netG = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)))
netD = DDP(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
sampler = DistributedSampler(Pairs())
loader = DataLoader(Pairs(), batch_size=12 // dist.get_world_size(), sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for real, noise in loader:
        optD.zero_grad()
        fake = netG(noise)
        scores = netD(torch.cat([real, fake.detach()]))
        labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
        F.binary_cross_entropy_with_logits(scores, labels).backward()
        optD.step()
        optG.zero_grad()
        F.binary_cross_entropy_with_logits(netD(fake), torch.ones(len(real), 1)).backward()
        optG.step()
dist.destroy_process_group()
