"""Fashion-MNIST with a wide residual network on any number of workers.

python examples/fashion_wideresnet_after.py
paceline run examples/fashion_wideresnet_after.py --workers 2
"""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="data", help="where Fashion-MNIST is, or is downloaded to")
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--width", type=int, default=10, help="times 16, 32 and 64 channels")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--base-lr", type=float, default=0.01)
parser.add_argument("--target-accuracy", type=float, default=0.85)
parser.add_argument("--patience", type=int, default=2)
arguments = parser.parse_args()


def convolve(channels_in, channels_out):
    """Convolve, normalise, rectify."""
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding="same", bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels_in, channels_out):
        super().__init__()
        same = channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1)
        first, second = convolve(channels_in, channels_out), convolve(channels_out, channels_out)
        self.body = nn.Sequential(first, nn.Dropout(0.01), second)

    def forward(self, images):
        """Keep height and width."""
        return self.body(images) + self.shortcut(images)


def make_net(width):
    """Build the network for (N, 1, 28, 28)."""
    small, middle, large = 16 * width, 32 * width, 64 * width
    return nn.Sequential(
        *(convolve(1, 16), Block(16, small), Block(small, small), nn.MaxPool2d(2)),
        *(Block(small, middle), Block(middle, middle), nn.MaxPool2d(2)),
        *(Block(middle, large), Block(large, large), nn.AvgPool2d(7)),
        *(nn.Flatten(), nn.Linear(large, 10)),
    )


def is_right(model, images, labels):
    """Tell for each image whether it is classified right."""
    return model(images).argmax(1) == labels


def main():
    """Train until the target is met in some epochs in a row."""
    s = paceline.session()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = {"download": True, "transform": transforms.ToTensor()}
    train_set = datasets.FashionMNIST(arguments.data, train=True, **options)
    test_set = datasets.FashionMNIST(arguments.data, train=False, **options)
    train = DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True)
    test = DataLoader(test_set, batch_size=arguments.batch_size)
    model = make_net(arguments.width).to(device)
    optimizer = optim.SGD(model.parameters(), lr=arguments.base_lr, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    accuracies = []
    model, optimizer, train, test = s.prepare(model, optimizer, train, test)
    for epoch in s.epochs(arguments.epochs):
        model.train()
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            s.backward(loss)
            optimizer.step()
        accuracy = s.evaluate(lambda b: {"accuracy": is_right(model, *b)}, test)["accuracy"]
        accuracies.append(accuracy)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")
        if min([0, *accuracies][-arguments.patience :]) >= arguments.target_accuracy:
            break


if __name__ == "__main__":
    main()
