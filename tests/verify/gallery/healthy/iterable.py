"""An IterableDataset shared by rank and by reader process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Lines(IterableDataset):
    def __init__(self, number, rank, world_size):
        generator = torch.Generator().manual_seed(0)
        self.records = torch.randn(number, 8, generator=generator)
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        shard, shards = self.rank * workers + worker, self.world_size * workers
        for index in range(shard, len(self.records), shards):
            record = self.records[index]
            yield record, record.sum()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = DataLoader(Lines(60, rank, world_size), batch_size=12 // world_size)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        for records, sums in loader:
            loss = (model(records).squeeze(1) - sums).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
