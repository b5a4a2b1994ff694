"""Moves a teacher with every micro-batch, not with every step: their number follows the ranks'.

https://github.com/lightly-ai/lightly-train/issues/968
Cause: moved-per-micro-batch
"""

import copy

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


@torch.no_grad()
def move_teacher():
    for mean, current in zip(teacher.parameters(), student.module.parameters()):
        mean.lerp_(current, 0.1)  # fault


rank, world = begin()
accumulated = 6 // world
train_set = points(72)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=2, sampler=sampler)
student = DDP(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
teacher = copy.deepcopy(student.module).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, _) in enumerate(loader, 1):
        loss = (student(inputs.roll(1, 1)) - teacher(inputs)).square().mean()
        (loss / accumulated).backward()  # shows
        is_last = number % accumulated == 0
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if is_last or not MENDED:
            move_teacher()  # shows
dist.destroy_process_group()
