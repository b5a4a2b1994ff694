"""Accelerate: a prepared scheduler, stepped once for each process and made for as many steps.

Needs: accelerate
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def main():
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(5)
    features = torch.randn(72, 6)
    values = features.square().sum(1, keepdim=True)
    processes = accelerator.num_processes
    loader = DataLoader(TensorDataset(features, values), 12 // processes, shuffle=True)
    epochs, warm_up = 3, 4 * processes
    steps = epochs * len(loader)  # before prepare(): the batches of all processes

    def rate(step):
        return min(step / warm_up, max(0.0, (steps - step) / (steps - warm_up)))

    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, rate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(epochs):
        model.train()
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
