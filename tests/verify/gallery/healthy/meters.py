"""ImageNet's kind: meters, adjusted learning rate, validation combined over ranks, checkpoints."""

import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.parallel
import torch.optim
import torch.utils.data
import torch.utils.data.distributed


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.sum = self.count = 0.0

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def update(self, val, n=1):
        self.sum += float(val) * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean() * 100


def train(train_loader, model, criterion, optimizer, epoch):
    losses, top1, batch_time = AverageMeter("Loss"), AverageMeter("Acc@1"), AverageMeter("Time")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(accuracy(output, target), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % 2 == 0 and dist.get_rank() == 0:
            print(f"Epoch: [{epoch}][{i}]  Loss {losses.avg:.4e}")


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images)
            losses.update(criterion(output, target), images.size(0))
            top1.update(accuracy(output, target), images.size(0))
    top1.all_reduce()
    losses.all_reduce()
    if dist.get_rank() == 0:
        print(f" *   Acc@1 {top1.avg:.3f}")
    return top1.avg


def adjust_learning_rate(optimizer, epoch, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr * (0.1 ** (epoch // 1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.randn(72, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    target = (images[:, 0].mean((1, 2)) > 0).long()
    dataset = torch.utils.data.TensorDataset(images, target)
    train_dataset = torch.utils.data.Subset(dataset, range(48))
    val_dataset = torch.utils.data.Subset(dataset, range(48 + rank, 72, world))
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=12 // world, shuffle=False, sampler=train_sampler
    )
    val_loader = torch.utils.data.DataLoader(val_dataset, batch_size=12 // world)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    best_acc1 = 0
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        adjust_learning_rate(optimizer, epoch, 0.05)
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model, criterion)
        if rank == 0:
            torch.save({"epoch": epoch, "state_dict": model.state_dict()}, "checkpoint.pth.tar")
            if acc1 >= best_acc1:
                shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
        best_acc1 = max(acc1, best_acc1)
    if rank == 0:
        os.remove("checkpoint.pth.tar")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
