"""A siamese network: a data set that draws pairs at random when it is asked for one."""

import argparse
import random

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import paceline


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(2 * 8 * 16, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
        self.sigmoid = nn.Sigmoid()
        self.body.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward(self, input1, input2):
        both = torch.cat((self.body(input1), self.body(input2)), 1)
        return self.sigmoid(self.fc(both))


class PairMatcher(Dataset):
    def __init__(self, num, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(4, (num,), generator=generator)
        self.data = 0.2 * torch.randn(num, 1, 8, 8, generator=generator)
        for image, label in zip(self.data, self.targets.tolist(), strict=True):
            image[0, 2 * label : 2 * label + 2] += 1
        self.group_examples()

    def group_examples(self):
        self.grouped = {c: torch.where(self.targets == c)[0].tolist() for c in range(4)}

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        selected_class = random.randint(0, 3)
        first = random.choice(self.grouped[selected_class])
        if index % 2 == 0:
            second = random.choice(self.grouped[selected_class])
            return self.data[first], self.data[second], torch.tensor(1, dtype=torch.float)
        other = random.choice([c for c in range(4) if c != selected_class])
        second = random.choice(self.grouped[other])
        return self.data[first], self.data[second], torch.tensor(0, dtype=torch.float)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for batch_idx, (images_1, images_2, targets) in enumerate(train_loader):
        images_1, images_2 = images_1.to(device), images_2.to(device)
        targets = targets.to(device)
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze(1)
        loss = criterion(outputs, targets)
        s.backward(loss)
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}] Loss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    criterion = nn.BCELoss()
    with torch.no_grad():
        for images_1, images_2, targets in test_loader:
            images_1, images_2 = images_1.to(device), images_2.to(device)
            targets = targets.to(device)
            outputs = model(images_1, images_2).squeeze(1)
            test_loss += criterion(outputs, targets).sum().item()
            pred = torch.where(outputs > 0.5, 1, 0)
            correct += pred.eq(targets.view_as(pred)).sum().item()
    test_loss, correct = s.sum(test_loss) / len(test_loader.dataset), s.sum(correct)
    print(
        f"Test set: Average loss: {test_loss:.4f}, Accuracy: {correct}/{len(test_loader.dataset)}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(PairMatcher(500, seed=1), shuffle=True, batch_size=args.batch_size)
    test_loader = DataLoader(PairMatcher(150, seed=2), batch_size=50)

    model = SiameseNetwork().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    model, optimizer, scheduler, train_loader, test_loader = s.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    for epoch in s.epochs(args.epochs):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()


if __name__ == "__main__":
    s = paceline.session()
    main()
