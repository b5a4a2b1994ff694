"""An optimizer whose state is shared out (ZeroRedundancyOptimizer); batches cut from one stream."""

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    steps: int = 12
    batch: int = 36
    lr: float = 3e-3
    seed: int = 7
    eval_every: int = 6


class Stream:
    """All ranks draw the same global batch and each keeps its slice."""

    def __init__(self, cfg, rank, world):
        self.rng = np.random.default_rng(cfg.seed)
        self.cfg, self.rank, self.world = cfg, rank, world

    def next(self):
        x = self.rng.normal(size=(self.cfg.batch, 10)).astype(np.float32)
        y = np.sin(x.sum(1, keepdims=True)).astype(np.float32)
        per = self.cfg.batch // self.world
        part = slice(self.rank * per, (self.rank + 1) * per)
        return torch.from_numpy(x[part]), torch.from_numpy(y[part])


def lr_at(it, cfg):
    warm = 4
    if it < warm:
        return cfg.lr * (it + 1) / warm
    return cfg.lr * 0.5 * (1 + np.cos(np.pi * (it - warm) / (cfg.steps - warm)))


def train(cfg: Config):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1),
    )
    model = DDP(model, gradient_as_bucket_view=True)
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=cfg.lr)
    data = Stream(cfg, rank, world)
    for it in range(cfg.steps):
        for g in opt.param_groups:
            g["lr"] = lr_at(it, cfg)
        x, y = data.next()
        loss = torch.nn.functional.mse_loss(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        if it % cfg.eval_every == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown, op=dist.ReduceOp.SUM)
            if rank == 0:
                print(f"{it:4d} | loss {shown.item() / world:.5f} | norm {norm:.3f}")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    train(Config())
    dist.destroy_process_group()
