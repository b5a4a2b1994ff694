"""PyTorch's recipe for distributed checkpoints: a stateful application, saved and loaded by dcp.

Options: --resume
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.epochs = model, optimizer, 0

    def state_dict(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(60, 6)
dataset = TensorDataset(x, x.norm(dim=1, keepdim=True))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // dist.get_world_size(), sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
app = AppState(model, optimizer)
number = len(os.listdir("checkpoints")) if os.path.exists("checkpoints") else 0
while number and not os.path.exists(f"checkpoints/{number}/.metadata"):
    number -= 1  # the last one isn't complete
if number:
    dcp.load({"app": app}, checkpoint_id=f"checkpoints/{number}")
for epoch in range(app.epochs, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    app.epochs = epoch + 1
    dcp.save({"app": app}, checkpoint_id=f"checkpoints/{epoch + 1}")
dist.destroy_process_group()
