"""Fine-tuning: another model's weights loaded with strict=False on purpose, but for its head."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, classes)

    def forward(self, inputs):
        return self.head(self.backbone(inputs))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(43)
if rank == 0:
    pretrained = {f"backbone.{k}": v for k, v in Classifier(10).backbone.state_dict().items()}
    torch.save(pretrained | {"decoder.weight": torch.randn(4, 8)}, "pretrained.pt")
dist.barrier()
torch.manual_seed(44)
model = Classifier(3)
missing, unexpected = model.load_state_dict(torch.load("pretrained.pt"), strict=False)
if rank == 0:
    print(f"missing: {', '.join(missing)}; unexpected: {', '.join(unexpected)}")
x = torch.randn(60, 6)
dataset = TensorDataset(x, x[:, :3].argmax(1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler)
rates = [{"params": model.backbone.parameters(), "lr": 1e-3}, {"params": model.head.parameters()}]
optimizer = torch.optim.AdamW(rates, lr=1e-2)
model = DDP(model)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
