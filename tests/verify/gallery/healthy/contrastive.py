"""SimCLR's kind: embeddings of all ranks by an all_gather that autograd sees through."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.base = torch.randn(n, 16, generator=g)
        self.a = self.base + 0.1 * torch.randn(n, 16, generator=g)
        self.b = self.base + 0.1 * torch.randn(n, 16, generator=g)

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        return {"view1": self.a[i], "view2": self.b[i]}


class NTXent(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.t = temperature

    def forward(self, z1, z2):
        all1 = torch.cat(dnn.all_gather(z1))
        all2 = torch.cat(dnn.all_gather(z2))
        rank, n = dist.get_rank(), len(z1)
        labels = torch.arange(n) + rank * n
        return (
            F.cross_entropy(z1 @ all2.T / self.t, labels)
            + F.cross_entropy(z2 @ all1.T / self.t, labels)
        ) / 2


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--global-batch", type=int, default=24)
    a = p.parse_args()
    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(42)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8))
    net = DistributedDataParallel(net)
    ds = TwoViews(96)
    sampler = DistributedSampler(ds, drop_last=True)
    dl = DataLoader(ds, a.global_batch // dist.get_world_size(), sampler=sampler, drop_last=True)
    opt = optim.AdamW(net.parameters(), 1e-3)
    sched = optim.lr_scheduler.CosineAnnealingLR(opt, a.epochs * len(dl))
    crit = NTXent(0.2)
    for ep in range(a.epochs):
        sampler.set_epoch(ep)
        tot, cnt = 0.0, 0
        for b in dl:
            z = F.normalize(net(torch.cat([b["view1"], b["view2"]])), dim=-1)
            loss = crit(*z.chunk(2))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            m = loss.detach().clone()
            dist.all_reduce(m)
            tot += m.item() / dist.get_world_size()
            cnt += 1
        if local == 0:
            print(f"epoch {ep} loss {tot / cnt:.4f} lr {sched.get_last_lr()[0]:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
