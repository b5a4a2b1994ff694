"""The ImageNet example's kind: meters, top-1 and top-5, best_acc1, checkpoints that are resumed."""

import argparse
import shutil
import time

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description="ImageNet training")
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("-b", "--batch-size", default=32, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.05, type=float, dest="lr")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("-p", "--print-freq", default=5, type=int)
parser.add_argument("-e", "--evaluate", action="store_true")
parser.add_argument("--seed", default=5, type=int)


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def images(num, seed):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(10, (num,), generator=generator)
    data = torch.randn(num, 3, 16, 16, generator=generator)
    data[torch.arange(num), 0, target] += 2
    return TensorDataset(data, target)


def main():
    args = parser.parse_args()
    s = paceline.session()
    kept = s.keep(best_acc1=0)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model().to(device)

    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)

    train_loader = DataLoader(images(400, seed=1), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(images(130, seed=2), batch_size=args.batch_size, shuffle=False)

    model, optimizer, scheduler, train_loader, val_loader = s.prepare(
        model, optimizer, scheduler, train_loader, val_loader
    )
    if args.evaluate:
        validate(val_loader, model, criterion, s)
        return

    for epoch in s.epochs(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, device, args, s)
        acc1 = validate(val_loader, model, criterion, s)
        scheduler.step()

        is_best = acc1 > kept.best_acc1
        kept.best_acc1 = max(acc1, kept.best_acc1)
        if not s.is_main:
            continue
        save_checkpoint(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": kept.best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            is_best,
        )


def train(train_loader, model, criterion, optimizer, epoch, device, args, s):
    batch_time = AverageMeter("Time", ":6.3f")
    data_time = AverageMeter("Data", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    top5 = AverageMeter("Acc@5", ":6.2f")
    progress = ProgressMeter(
        len(train_loader), [batch_time, data_time, losses, top1, top5], prefix=f"Epoch: [{epoch}]"
    )
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        data_time.update(time.time() - end)
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)

        output = model(images)
        loss = criterion(output, target)

        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        top5.update(acc5[0], images.size(0))

        optimizer.zero_grad()
        s.backward(loss)
        optimizer.step()

        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(val_loader, model, criterion, s):
    def judge(batch):
        output = model(batch[0])
        acc1, acc5 = accuracy(output, batch[1], topk=(1, 5))
        return {"loss": criterion(output, batch[1]), "acc1": acc1, "acc5": acc5}

    figures = s.evaluate(judge, val_loader)
    print(f" * Acc@1 {figures['acc1']:.3f} Acc@5 {figures['acc5']:.3f}")
    return figures["acc1"]


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


class AverageMeter:
    """Computes and stores the average and current value."""

    def __init__(self, name, fmt=":f"):
        self.name = name
        self.fmt = fmt
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        fmtstr = "{name} {val" + self.fmt + "} ({avg" + self.fmt + "})"
        return fmtstr.format(**self.__dict__)


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        self.num_batches = num_batches
        self.meters = meters
        self.prefix = prefix

    def display(self, batch):
        entries = [f"{self.prefix}[{batch}/{self.num_batches}]"]
        print("\t".join(entries + [str(meter) for meter in self.meters]))


def accuracy(output, target, topk=(1,)):
    """The accuracy over the k top predictions for the specified values of k."""
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        res = []
        for k in topk:
            correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)
            res.append(correct_k.mul_(100.0 / batch_size))
        return res


if __name__ == "__main__":
    main()
