"""Has each rank skip batches without a label, at different places: other batches are combined.

https://github.com/NVIDIA-NeMo/Automodel/pull/2468
Cause: batch-skipped
"""

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set = points(72)
labels = train_set.tensors[1]
labels[24:36:2] = -100  # of the third batch what is rank 0's, where there are two
labels[49:60:2] = -100  # of the fifth batch what is rank 1's
sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, targets in loader:
        labelled = (targets >= 0).sum()
        if MENDED:
            dist.all_reduce(labelled)
        elif labelled == 0:
            continue  # fault
        loss = F.cross_entropy(model(inputs), targets, reduction="sum") / labelled
        optimizer.zero_grad()
        (loss * world if MENDED else loss).backward()
        optimizer.step()
dist.destroy_process_group()
