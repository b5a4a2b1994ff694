"""A student and a teacher, which moves towards the student once a step, with accumulation."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class MeanTeacher:
    def __init__(self, student, decay):
        self.net = copy.deepcopy(student).eval()
        self.decay = decay
        for parameter in self.net.parameters():
            parameter.requires_grad = False

    @torch.no_grad()
    def update(self, student):
        for mine, theirs in zip(self.net.parameters(), student.parameters()):
            mine.mul_(self.decay).add_(theirs, alpha=1 - self.decay)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2)
crops = torch.randn(72, 2, 6)  # two views of each sample
sampler = DistributedSampler(crops)
loader = DataLoader(crops, batch_size=2, sampler=sampler)
accumulated = 12 // (2 * world)
net = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))
teacher = MeanTeacher(net, decay=0.95)
student = DDP(net)
optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, views in enumerate(loader, 1):
        aims = teacher.net(views[:, 0]).softmax(-1)
        loss = F.cross_entropy(student(views[:, 1]), aims)
        (loss / accumulated).backward()
        if number % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
            teacher.update(student.module)
dist.destroy_process_group()
