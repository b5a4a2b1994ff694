"""Saves the weights, and not their moving average, which begins anew after a restart.

https://github.com/ai2cm/ace/issues/349
Cause: not-saved
Options: --resume
"""

import os

import torch
import torch.distributed as dist
from common import MENDED, begin, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

rank, world = begin()
train_set, (test_inputs, test_targets) = points(60), points(24, seed=2).tensors
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(6, 2))
averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # fault
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.module.load_state_dict(saved["model"])
    if MENDED:
        averaged.load_state_dict(saved["averaged"])
    first = saved["epochs"]
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        averaged.update_parameters(model.module)
    with torch.no_grad():
        loss = F.cross_entropy(averaged.eval()(test_inputs), test_targets)  # shows
    state = {"model": model.module.state_dict(), "epochs": epoch + 1}
    if MENDED:
        state["averaged"] = averaged.state_dict()
    if rank == 0:
        print(f"epoch {epoch}: validation loss {loss:.5f}")
        torch.save(state, "last.pt")
    dist.barrier()
dist.destroy_process_group()
