"""A CIFAR-10 script of the usual kind: globals, transforms, best_acc, cosine learning rate."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import torchvision
import torchvision.transforms as transforms

import paceline

parser = argparse.ArgumentParser(description="CIFAR10 training")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--epochs", default=2, type=int)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
s = paceline.session()
kept = s.keep(best_acc=0)
torch.manual_seed(0)

print("==> Preparing data..")
transform_train = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ]
)
transform_test = transforms.Compose(
    [
        transforms.ToTensor(),
        transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ]
)
trainset = torchvision.datasets.FakeData(300, (3, 32, 32), transform=transform_train)
trainloader = torch.utils.data.DataLoader(trainset, batch_size=64, shuffle=True, num_workers=0)
testset = torchvision.datasets.FakeData(
    100, (3, 32, 32), transform=transform_test, random_offset=300
)
testloader = torch.utils.data.DataLoader(testset, batch_size=50, shuffle=False, num_workers=0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, 2, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.linear = nn.Linear(16, 10)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = F.avg_pool2d(out, 8)
        return self.linear(out.view(out.size(0), -1))


print("==> Building model..")
net = Net()
net = net.to(device)

criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
net, optimizer, scheduler, trainloader, testloader = s.prepare(
    net, optimizer, scheduler, trainloader, testloader
)


def train(epoch):
    print(f"\nEpoch: {epoch}")
    net.train()
    train_loss = 0
    correct = 0
    total = 0
    for _batch_idx, (inputs, targets) in enumerate(trainloader):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        s.backward(loss)
        optimizer.step()

        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
    print(f"Loss: {train_loss / len(trainloader):.3f} | Acc: {100.0 * correct / total:.3f}%")


def test(epoch):
    def judge(batch):
        outputs = net(batch[0])
        return {"loss": criterion(outputs, batch[1]), "accuracy": outputs.max(1)[1].eq(batch[1])}

    figures = s.evaluate(judge, testloader)
    acc = 100.0 * figures["accuracy"]
    print(f"Loss: {figures['loss']:.3f} | Acc: {acc:.3f}%")
    is_best, kept.best_acc = acc > kept.best_acc, max(acc, kept.best_acc)
    if is_best and s.is_main:
        print("Saving..")
        state = {"net": net.state_dict(), "acc": acc, "epoch": epoch}
        if not os.path.isdir("checkpoint"):
            os.mkdir("checkpoint")
        torch.save(state, "./checkpoint/ckpt.pth")


for epoch in s.epochs(args.epochs):
    train(epoch)
    test(epoch)
    scheduler.step()
