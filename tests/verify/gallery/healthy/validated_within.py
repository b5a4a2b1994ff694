"""Validation every few steps within an epoch, by each rank's share of the validation set."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def validate(model, loader):
    model.eval()
    total = torch.zeros(2)
    with torch.inference_mode():
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
            total += torch.stack([loss, torch.tensor(targets.numel())])
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    x = torch.randn(114, 4)
    y = x.prod(1, keepdim=True)
    train_set = TensorDataset(x[:96], y[:96])
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
    val_loader = DataLoader(TensorDataset(x[96 + rank :: world], y[96 + rank :: world]), 4)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    best = float("inf")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(train_loader, 1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % 3 == 0:
                found = validate(model, val_loader)
                best = min(best, found)
                if rank == 0:
                    print(f"epoch {epoch} batch {number}: val loss {found:.5f}, best {best:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
