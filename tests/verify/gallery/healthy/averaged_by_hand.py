"""A loop without a wrapper: parameters broadcast, gradients flattened, combined and divided."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    gradients = [p.grad for p in model.parameters()]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat /= dist.get_world_size()
    for gradient, averaged in zip(gradients, _unflatten_dense_tensors(flat, gradients)):
        gradient.copy_(averaged)


def run():
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(60, 4, generator=generator)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12 // dist.get_world_size(), sampler=sampler)
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(4, 16), nn.ELU(), nn.Linear(16, 1))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            running += torch.tensor([loss.item() * len(inputs), len(inputs)])
        dist.all_reduce(running)
        if dist.get_rank() == 0:
            print(f"Epoch {epoch}: loss {running[0] / running[1]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run()
