"""autocast and GradScaler that are switched off where there is no GPU."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--no-amp", action="store_true")
args = parser.parse_args()
use_amp = torch.cuda.is_available() and not args.no_amp
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(11)
images = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(images, (images.mean((1, 2, 3)) > 0).long())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, 12 // dist.get_world_size(), sampler=sampler, num_workers=0)
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
model = DDP(nn.Sequential(net, nn.Linear(144, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler(enabled=use_amp)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for image, label in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda" if use_amp else "cpu", enabled=use_amp):
            loss = nn.functional.cross_entropy(model(image), label)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
dist.destroy_process_group()
