"""Augmentation seeded by sample and epoch, in reader processes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Shifted(Dataset):
    def __init__(self, images):
        self.images, self.epoch = images, 0

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.epoch + index)
        shift = int(torch.randint(-1, 2, (), generator=generator))
        image = self.images[index]
        return image.roll(shift, -1), int(image.mean() > 0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Shifted(torch.randn(48, 1, 6, 6))
    sampler = DistributedSampler(dataset, seed=7)
    loader = DataLoader(dataset, 12 // dist.get_world_size(), sampler=sampler, num_workers=1)
    model = DDP(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        dataset.epoch = epoch
        for image, label in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(image), label).backward()
            optimizer.step()
    dist.destroy_process_group()
