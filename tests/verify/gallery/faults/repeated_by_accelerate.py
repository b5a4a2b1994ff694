"""Trains on some samples twice: Accelerate makes the ranks' batches even by repeating the first.

https://github.com/huggingface/accelerate/issues/2316
Cause: padded-training
Needs: accelerate
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from common import MENDED, points
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

config = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=config)
torch.manual_seed(0)
loader = DataLoader(points(54), 12 // accelerator.num_processes, shuffle=True, drop_last=MENDED)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # fault
for epoch in range(2):
    loader.set_epoch(epoch)
    for inputs, targets in loader:  # shows
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
accelerator.end_training()
