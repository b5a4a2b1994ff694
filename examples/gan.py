"""A script of your own with two models and two optimizers: a generator learns a ring of points.

python examples/gan.py
paceline run examples/gan.py --workers 2
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline


def draw_ring(samples: int) -> torch.Tensor:
    """Put points (samples, 2) on the unit circle."""
    angles = torch.linspace(0, 2 * torch.pi, samples)
    return torch.stack([angles.cos(), angles.sin()], 1)


def make_net(outputs: int) -> nn.Sequential:
    """Two hidden layers on pairs of numbers."""
    hidden = (nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def main() -> None:
    """Train both in turns."""
    with paceline.session() as s:
        generator = s.model(make_net(2), name="generator")
        judge = s.model(make_net(1), name="judge")
        generating = s.optimizer(torch.optim.Adam(generator.parameters(), 1e-3))
        judging = s.optimizer(torch.optim.Adam(judge.parameters(), 1e-3))
        batches = s.loader(TensorDataset(draw_ring(4096)), global_batch=256)
        for _ in s.epochs(10):
            for (real,) in batches:
                fake = generator(torch.randn_like(real))  # other noise on every worker
                right, wrong = judge(real), judge(fake.detach())
                s.step(F.softplus(-right).mean() + F.softplus(wrong).mean(), judging)
                s.step(F.softplus(-judge(fake)).mean(), generating)
            with torch.no_grad():
                distance = (generator(torch.randn(512, 2, device=s.device)).norm(dim=1) - 1).abs()
            s.log(distance=distance.mean())


if __name__ == "__main__":
    main()
