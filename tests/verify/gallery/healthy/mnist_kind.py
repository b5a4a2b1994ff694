"""pytorch/examples' kind: train() and test() by arguments, a small convnet with dropout, StepLR."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(24, 4)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout(torch.flatten(F.max_pool2d(x, 2), 1))
        return F.log_softmax(self.fc(x), dim=1)


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0 and dist.get_rank() == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]")


def test(model, test_loader):
    model.eval()
    totals = torch.zeros(3)
    with torch.no_grad():
        for data, target in test_loader:
            output = model.module(data)
            totals[0] += F.nll_loss(output, target, reduction="sum")
            totals[1] += output.argmax(dim=1).eq(target).sum()
            totals[2] += len(data)
    dist.all_reduce(totals)
    loss, correct, number = totals.tolist()
    if dist.get_rank() == 0:
        print(f"Test set: Average loss: {loss / number:.4f}, Accuracy: {correct:.0f}/{number:.0f}")


def images(number, seed):
    data = torch.rand(number, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(data, (data.mean((1, 2, 3)) * 100).long() % 4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12, help="of all processes together")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Net())
    torch.manual_seed(args.seed + rank)
    train_set, test_set = images(72, 1), images(30, 2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler)
    mine = torch.utils.data.Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(mine, batch_size=10)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
