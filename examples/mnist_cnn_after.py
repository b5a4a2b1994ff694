"""MNIST on any number of workers: the small CNN of the articles on DDP.

python examples/mnist_cnn_after.py
paceline run examples/mnist_cnn_after.py --workers 2
"""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data", help="where MNIST is, or is downloaded to")
parser.add_argument("--epochs", type=int, default=5)
arguments = parser.parse_args()


class Net(nn.Module):
    """Two convolutions and two linear layers; gives log-probabilities of the ten digits."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Sequential(nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images):
        """Classify (N, 1, 28, 28)."""
        return F.log_softmax(self.head(self.features(images).flatten(1)), dim=1)


def is_right(model, images, labels):
    """Tell for each image whether it is classified right."""
    return model(images).argmax(1) == labels


def main():
    """Train, and evaluate after every epoch."""
    s = paceline.session()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    options = {"download": True, "transform": transforms.Compose(steps)}
    train_set = datasets.MNIST(arguments.data, train=True, **options)
    test_set = datasets.MNIST(arguments.data, train=False, **options)
    train = DataLoader(train_set, batch_size=64, shuffle=True)
    test = DataLoader(test_set, batch_size=1000)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=0.01)
    model, optimizer, train, test = s.prepare(model, optimizer, train, test)
    for epoch in s.epochs(arguments.epochs):
        model.train()
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            s.backward(loss)
            optimizer.step()
        accuracy = s.evaluate(lambda b: {"accuracy": is_right(model, *b)}, test)["accuracy"]
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
