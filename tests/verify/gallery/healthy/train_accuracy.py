"""A pass over the training loader under no_grad, for the accuracy on what was trained on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(12)
x = torch.randn(78, 5)
y = (x[:, 0] * x[:, 1] > 0).long()
train_set = TensorDataset(x[:60], y[:60])
sampler = DistributedSampler(train_set, shuffle=True)
train_loader = DataLoader(train_set, batch_size=12 // world, sampler=sampler)
val_loader = DataLoader(TensorDataset(x[60 + rank :: world], y[60 + rank :: world]), 6)
model = DDP(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def evaluate(loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for inputs, targets in loader:
            hits = (model(inputs).argmax(1) == targets).sum()
            counts += torch.tensor([hits, len(inputs)])
    dist.all_reduce(counts)
    return counts[0] / counts[1]


for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    on_train, on_val = evaluate(train_loader), evaluate(val_loader)
    if rank == 0:
        print(f"Epoch {epoch}: train accuracy {on_train:.4f}, validation accuracy {on_val:.4f}")
dist.destroy_process_group()
