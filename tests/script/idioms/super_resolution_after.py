"""Sub-pixel super-resolution: everything at the module's top level, orthogonal weights."""

import argparse

import torch
from torch import nn, optim
from torch.nn import init
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description="Super resolution")
parser.add_argument("--upscale_factor", type=int, default=2)
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--testBatchSize", type=int, default=10)
parser.add_argument("--nEpochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--seed", type=int, default=123)
opt = parser.parse_args()

s = paceline.session()
torch.manual_seed(opt.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 64, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(64, 64, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(64, 32, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(32, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x):
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))

    def _initialize_weights(self):
        init.orthogonal_(self.conv1.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv2.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv3.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)


def pictures(num, seed):
    generator = torch.Generator().manual_seed(seed)
    large = torch.rand(num, 1, 4, 4, generator=generator)
    large = nn.functional.interpolate(large, size=16, mode="bilinear")
    small = nn.functional.interpolate(large, scale_factor=1 / opt.upscale_factor, mode="area")
    return TensorDataset(small, large)


print("===> Loading datasets")
train_set = pictures(100, seed=1)
test_set = pictures(30, seed=2)
training_data_loader = DataLoader(dataset=train_set, batch_size=opt.batchSize, shuffle=True)
testing_data_loader = DataLoader(dataset=test_set, batch_size=opt.testBatchSize, shuffle=False)

print("===> Building model")
model = Net(upscale_factor=opt.upscale_factor).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=opt.lr)
model, optimizer, training_data_loader, testing_data_loader = s.prepare(
    model, optimizer, training_data_loader, testing_data_loader
)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        s.backward(loss)
        optimizer.step()
        print(f"===> Epoch[{epoch}]({iteration}/{len(training_data_loader)}): {loss.item():.4f}")
    print(f"===> Epoch {epoch} Complete: Avg. {epoch_loss / len(training_data_loader):.4f}")


def test():
    def judge(batch):
        mse = (model(batch[0]) - batch[1]).square().mean((1, 2, 3))
        return {"psnr": 10 * torch.log10(1 / mse)}

    print(f"===> Avg. PSNR: {s.evaluate(judge, testing_data_loader)['psnr']:.4f} dB")


def checkpoint(epoch):
    path = f"model_epoch_{epoch}.pth"
    if s.is_main:
        torch.save(model, path)
    print(f"Checkpoint saved to {path}")


for epoch in s.epochs(opt.nEpochs):
    train(epoch)
    test()
    checkpoint(epoch)
