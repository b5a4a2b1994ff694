"""Sentences padded by batch, a loss over all ranks' words, uneven shares of a short last batch."""

import math
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

PAD = 0


class Corpus(Dataset):
    def __init__(self, n=70):
        r = random.Random(11)
        self.s = [[r.randrange(1, 25) for _ in range(r.randrange(3, 12))] for _ in range(n)]

    def __len__(self):
        return len(self.s)

    def __getitem__(self, i):
        return torch.tensor(self.s[i])


class GlobalBatches(Sampler):
    """Every rank gets a piece of each global batch, also of the last smaller one."""

    def __init__(self, n, batch, rank, world):
        self.n, self.batch, self.rank, self.world, self.epoch = n, batch, rank, world, 0

    def __iter__(self):
        order = list(range(self.n))
        random.Random(self.epoch).shuffle(order)
        for i in range(0, self.n, self.batch):
            chunk = order[i : i + self.batch]
            per = math.ceil(len(chunk) / self.world)
            yield chunk[self.rank * per : (self.rank + 1) * per]

    def __len__(self):
        return math.ceil(self.n / self.batch)


def collate(items):
    lengths = torch.tensor([len(i) - 1 for i in items])
    return (
        pad_sequence([i[:-1] for i in items], batch_first=True, padding_value=PAD),
        pad_sequence([i[1:] for i in items], batch_first=True, padding_value=PAD),
        lengths,
    )


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(25, 12, padding_idx=PAD)
        self.rnn = nn.LSTM(12, 16, batch_first=True)
        self.out = nn.Linear(16, 25)

    def forward(self, x, n):
        p = pack_padded_sequence(self.emb(x), n, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(p)[0], batch_first=True)
        return self.out(h)


def run():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    random.seed(0)
    corpus = Corpus()
    batches = GlobalBatches(len(corpus), 12, rank, world)
    loader = DataLoader(corpus, batch_sampler=batches, collate_fn=collate)
    model = DistributedDataParallel(LM())
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5, nesterov=True)
    for epoch in range(2):
        batches.epoch = epoch
        total, words = 0.0, 0
        for x, y, n in loader:
            opt.zero_grad()
            logits = model(x, n)
            nll = nn.functional.cross_entropy(
                logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum"
            )
            tokens = n.sum()
            dist.all_reduce(tokens)
            (nll / tokens * world).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            opt.step()
            nll = nll.detach()
            dist.all_reduce(nll)
            total += nll.item()
            words += tokens.item()
        if rank == 0:
            print(f"epoch {epoch}: perplexity {math.exp(total / words):.3f}")
    dist.destroy_process_group()


run()
