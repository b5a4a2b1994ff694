"""A frozen backbone, two groups of parameters, label smoothing and OneCycleLR."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 2)

    def forward(self, inputs):
        with torch.no_grad():
            features = self.backbone(inputs)
        return self.head(self.norm(features))


def groups(model):
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in trained if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for _, p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = Classifier()
    for parameter in model.backbone.parameters():
        parameter.requires_grad_(False)
    ddp = DDP(model)
    inputs = torch.randn(60, 6)
    data = TensorDataset(inputs, (inputs[:, 0] * inputs[:, 1] > 0).long())
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, 12 // world, sampler=sampler, drop_last=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    steps = 2 * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = criterion(ddp(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
