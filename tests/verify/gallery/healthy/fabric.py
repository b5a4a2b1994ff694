"""Lightning Fabric: the loop is the author's own, set-up and backward pass are Fabric's.

Needs: lightning
"""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

world_size = int(os.environ["WORLD_SIZE"])
accumulated = 6 // world_size
fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp")
fabric.launch()
fabric.seed_everything(7)

model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
model, optimizer = fabric.setup(model, optimizer)
x = torch.randn(72, 5, generator=torch.Generator().manual_seed(3))
loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=2, shuffle=True)
loader = fabric.setup_dataloaders(loader)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)

model.train()
for epoch in range(2):
    loader.sampler.set_epoch(epoch) if world_size > 1 else None
    for number, (inputs, targets) in enumerate(loader, 1):
        is_accumulating = number % accumulated != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss / accumulated)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
            fabric.print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.4f}")
