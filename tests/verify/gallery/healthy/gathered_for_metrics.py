"""Accelerate: gather_for_metrics() where the test set does not divide; repeats are cut off.

Needs: accelerate
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(7)
    features = torch.randn(78, 6)
    labels = (features[:, 0] + features[:, 1] > 0).long()
    per_process = 12 // accelerator.num_processes
    train = DataLoader(TensorDataset(features[:60], labels[:60]), per_process, shuffle=True)
    test = DataLoader(TensorDataset(features[60:], labels[60:]), 8)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    model, optimizer, train, test = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=5e-3), train, test
    )
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
    for _ in range(3):
        model.train()
        for inputs, targets in train:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        predicted, expected = [], []
        for inputs, targets in test:
            with torch.no_grad():
                found = model(inputs).argmax(-1)
            found, targets = accelerator.gather_for_metrics((found, targets))
            predicted.append(found)
            expected.append(targets)
        schedule.step((torch.cat(predicted) == torch.cat(expected)).float().mean())
    accelerator.end_training()


if __name__ == "__main__":
    main()
