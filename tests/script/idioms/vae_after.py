"""A variational autoencoder: a module-level script whose loss is a sum over the batch."""

import argparse
import os

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.utils import save_image

import paceline

parser = argparse.ArgumentParser(description="VAE")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=5)
args = parser.parse_args()
s = paceline.session()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def squares(num, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.zeros(num, 1, 8, 8)
    for image in data:
        top, left = torch.randint(5, (2,), generator=generator).tolist()
        image[0, top : top + 4, left : left + 4] = 1
    return TensorDataset(data, torch.zeros(num))


train_loader = DataLoader(squares(600, seed=1), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(squares(150, seed=2), batch_size=args.batch_size, shuffle=False)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc21 = nn.Linear(32, 4)
        self.fc22 = nn.Linear(32, 4)
        self.fc3 = nn.Linear(4, 32)
        self.fc4 = nn.Linear(32, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, train_loader, test_loader = s.prepare(model, optimizer, train_loader, test_loader)


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        s.backward(loss / len(data))
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}] Loss: {loss.item() / len(data):.6f}")
    train_loss = s.sum(train_loss)
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for i, (data, _) in enumerate(test_loader):
            data = data.to(device)
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
            if i == 0 and s.is_main:
                n = min(data.size(0), 8)
                comparison = torch.cat([data[:n], recon_batch.view(-1, 1, 8, 8)[:n]])
                save_image(comparison.cpu(), f"results/reconstruction_{epoch}.png", nrow=n)
    test_loss = s.sum(test_loss) / len(test_loader.dataset)
    print(f"====> Test set loss: {test_loss:.4f}")


if __name__ == "__main__":
    os.makedirs("results", exist_ok=True)
    for epoch in s.epochs(args.epochs):
        train(epoch)
        test(epoch)
        if not s.is_main:
            continue
        with torch.no_grad():
            sample = torch.randn(64, 4, device=device)
            sample = model.decode(sample).cpu()
            save_image(sample.view(64, 1, 8, 8), f"results/sample_{epoch}.png")
