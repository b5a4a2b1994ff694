"""A script that looks for a checkpoint and finds none, and saves the best and the last."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--save-dir", default="checkpoints")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(29)
x = torch.rand(80, 3)
y = (x * torch.tensor([1.0, -2.0, 3.0])).sum(1, keepdim=True)
train_set = TensorDataset(x[:60], y[:60])
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
model = DDP(nn.Linear(3, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
first, best = 0, float("inf")
found = sorted(glob.glob(os.path.join(args.save_dir, "epoch*.pt")))
if found:
    saved = torch.load(found[-1])
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first, best = saved["epoch"] + 1, saved["best"]
elif rank == 0:
    print(f"=> no checkpoint found at {args.save_dir!r}")
    os.makedirs(args.save_dir, exist_ok=True)
for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.mse_loss(model.module(x[60:]), y[60:]).item()
    best = min(best, loss)
    if rank == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch, "best": best}, f"{args.save_dir}/epoch{epoch}.pt")
        print(f"epoch {epoch}: val loss {loss:.5f} (best {best:.5f})")
dist.destroy_process_group()
