"""Accelerate: prepare(), accumulate(), clipping, and predictions gathered for metrics.

Needs: accelerate
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(accelerator, batch_size=12):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 8, generator=generator)
    y = (x[:, 0] > x[:, 1]).long()
    train, test = TensorDataset(x[:72], y[:72]), TensorDataset(x[72:], y[72:])
    per_process = batch_size // accelerator.num_processes
    return DataLoader(train, per_process, shuffle=True), DataLoader(test, per_process)


def main():
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(accelerator)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(2):
        model.train()
        train_dataloader.set_epoch(epoch)
        for inputs, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        right = seen = 0
        for inputs, labels in eval_dataloader:
            with torch.no_grad():
                predicted = model(inputs).argmax(-1)
            predicted, labels = accelerator.gather_for_metrics((predicted, labels))
            right, seen = right + (predicted == labels).sum().item(), seen + len(labels)
        accelerator.print(f"epoch {epoch}: accuracy {right / seen:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
