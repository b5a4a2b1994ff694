"""Plain PyTorch scripts: faultless ones, and each fault as a small change of one of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_HEAD = """
import random
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


def points(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())

"""

PLAIN = (
    _HEAD
    + """
class Centred(nn.Module):
    \"\"\"Takes the mean of what it has seen off.\"\"\"

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(6))

    def forward(self, inputs):
        if self.training:
            mean = inputs.mean(0)
            dist.all_reduce(mean)
            self.center.lerp_(mean / world, 0.1)
        return inputs - self.center


def evaluate(model):
    model.eval()
    right = torch.zeros(())
    with torch.no_grad():
        for inputs, targets in test:
            right += (model(inputs).argmax(1) == targets).sum()
    dist.all_reduce(right)
    return right / len(test_set)


train_set, test_set = points(48, 1), points(21, 2)
model = nn.Sequential(
    Centred(), nn.Linear(6, 16), nn.GroupNorm(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
test = DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=8)
torch.manual_seed(100 + rank)
for epoch in range(5):
    sampler.set_epoch(epoch)
    model.train()
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    accuracy = evaluate(model)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.4f}, lr {scheduler.get_last_lr()[0]:.3g}")
dist.destroy_process_group()
"""
)
"""Everything that a script has to see to by itself, done right."""

UNEVEN = (
    _HEAD
    + """
class Shares(Sampler):
    \"\"\"Each rank's share of an order that all have; nothing is padded.\"\"\"

    epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(51, generator=generator).tolist()[rank::world])

    def __len__(self):
        return len(range(rank, 51, world))


train_set = points(51, 1)
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = Shares()
train = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
for epoch in range(2):
    sampler.epoch = epoch
    for inputs, targets in train:
        total = torch.tensor(len(inputs))
        dist.all_reduce(total)
        loss = F.cross_entropy(model(inputs), targets) * len(inputs) * world / total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
"""
)
"""Shares of unequal size, weighted."""

AUGMENTED = (
    _HEAD
    + """
class Noisy(Dataset):
    \"\"\"Adds noise to its samples.\"\"\"

    def __init__(self, kept):
        self.kept = kept

    def __len__(self):
        return len(self.kept)

    def __getitem__(self, index):
        inputs, target = self.kept[index]
        return inputs + 0.1 * torch.randn(6), target


train_set = Noisy(points(32, 1))
model = DistributedDataParallel(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
torch.manual_seed(100 + rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in train:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()
"""
)
"""Augmentation with random numbers of each rank's own."""

BY_HAND = (
    _HEAD
    + """
train_set = points(32, 1)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=16 // world, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in train:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
dist.destroy_process_group()
"""
)
"""Gradients averaged by the script itself."""

PEEKING = BY_HAND.replace("for epoch", "inputs, _ = next(iter(train))\nfor epoch", 1).replace(
    "train_set = points(32, 1)",
    "train_set, test_set = points(32, 1), points(8, 2)\n"
    "shown = next(iter(DataLoader(test_set, batch_size=4)))",
)
"""Looks at a batch first, of what it trains on and of something else."""

NESTED = BY_HAND.replace(
    "train_set = points",
    '''
class Shard(DataLoader):
    """Gives what another loader does, one batch late, to know the last one: Accelerate's way."""

    def __init__(self, base):
        super().__init__(base.dataset, batch_sampler=base.batch_sampler)
        self.base = base

    def __iter__(self):
        batches = iter(self.base)
        batch = next(batches)
        for after in batches:
            yield batch
            batch = after
        yield batch


train_set = points''',
    1,
).replace("for epoch", "train = Shard(train)\nfor epoch", 1)
"""A loader within a loader, which takes a batch ahead."""

COUNTING = BY_HAND.replace(
    "    for inputs, targets in train:\n",
    """    batches = iter(train)
    after = next(batches)
    for number in range(len(train)):
        inputs, targets = after
        if number + 1 < len(train):
            after = next(batches)
""",
)
"""Takes a batch ahead, and no more than there are: Lightning's way."""

RANK_0_JUDGES = PLAIN.replace("    accuracy = evaluate(model)\n", "").replace(
    "    if rank == 0:\n",
    "    if rank == 0:\n"
    "        judging = DataLoader(test_set, batch_size=8)\n"
    "        model.eval()\n"
    "        right = sum((model.module(x).argmax(1) == y).sum().item() for x, y in judging)\n"
    "        accuracy = right / len(test_set)\n",
)
"""Evaluation on rank 0 alone, with a loader that is made anew every time."""

IN_ORDER = BY_HAND.replace(
    "DistributedSampler(train_set)", "DistributedSampler(train_set, shuffle=False)"
)
"""The data set's own order: ranks stride through it, and a step has the samples of one process."""

FAULTLESS = {
    "in-order": IN_ORDER,
    "plain": PLAIN,
    "rank-0-judges": RANK_0_JUDGES,
    "uneven": UNEVEN,
    "augmented": AUGMENTED,
    "by-hand": BY_HAND,
    "peeking": PEEKING,
    "nested": NESTED,
    "counting": COUNTING,
}


@dataclass(frozen=True)
class Fault:
    """A fault, planted by replacing text of a faultless script."""

    cause: str
    changes: Sequence[tuple[str, str]]
    script: str = PLAIN
    told: str = ""
    """Words that the finding must have."""
    code: int = 65

    def write(self, directory: Path) -> Path:
        """Write the script with its fault."""
        text = self.script
        for old, new in self.changes:
            assert old in text, old
            text = text.replace(old, new)
        path = directory / "train.py"
        path.write_text(text)
        return path


_UNSAMPLED = ("sampler=sampler)", "shuffle=True)")
_SEEDED = ("torch.manual_seed(100 + rank)\n", "")

ALONE = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(48, 6)
train_set = TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for inputs, targets in DataLoader(train_set, batch_size=16, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
"""
"""A script for one process."""

NOISY = PLAIN.replace("nn.Dropout(0.2), ", "").replace(
    "F.cross_entropy(model(inputs), targets)",
    "F.cross_entropy(model(inputs + 0.1 * torch.randn_like(inputs)), targets)",
)
"""Noise drawn in every step, as a variational autoencoder does."""

FAULTS = {
    "one process's script": Fault("no-communication", [], ALONE, told="one training, 2 times"),
    "a process group that isn't used": Fault(
        "no-communication",
        [
            ("torch.manual_seed(0)\n", "dist.init_process_group('gloo')\ntorch.manual_seed(0)\n"),
            ("import torch\n", "import torch\nimport torch.distributed as dist\n"),
        ],
        ALONE,
        told="a process group, never used",
    ),
    "seeded apart, and never combined": Fault(
        "no-communication",
        [("manual_seed(0)", "manual_seed(int(__import__('os').environ['RANK']))")],
        ALONE,
        told="never communicate",
    ),
    "values from each rank's own part": Fault(
        "other-values",
        [
            (
                "train_set = points(32, 1)\n",
                "inputs, targets = points(32, 1).tensors\n"
                "own = inputs[rank::world]\n"
                "train_set = TensorDataset((inputs - own.mean(0)) / own.std(0), targets)\n",
            )
        ],
        BY_HAND,
        told="have other values than on 1 worker",
    ),
    "an epoch that one rank alone is told": Fault(
        "shares-overlap",
        [("    sampler.set_epoch(epoch)", "    if rank == 0:\n        sampler.set_epoch(epoch)")],
        BY_HAND,
        told="have different epochs (1, 0)",
    ),
    "a sum as loss": Fault(
        "gradient-factor",
        [
            ("targets)\n        opt", "targets, reduction='sum')\n        opt"),
            ("lr=0.1", "lr=0.01"),
        ],
        told="gradients of step 1 are 2 times too small: the loss is a sum",
    ),
    "a sum as loss, and noise": Fault(
        "gradient-factor",
        [
            ("targets)\n        opt", "targets, reduction='sum')\n        opt"),
            ("lr=0.1", "lr=0.01"),
        ],
        NOISY,
        told="2 times too small",
    ),
    "gradients added up": Fault(
        "gradient-factor",
        [("            parameter.grad /= world\n", "")],
        BY_HAND,
        told="gradients of step 1 are 2 times too large",
    ),
    "gradients divided twice": Fault(
        "gradient-factor",
        [("            parameter.grad /= world\n", "            parameter.grad /= world**2\n")],
        BY_HAND,
        told="divided once too often",
    ),
    "a forgotten set_epoch, after a look": Fault(
        "set-epoch", [("    sampler.set_epoch(epoch)\n", "")], PEEKING, told="epoch 2 has the same"
    ),
    "no distributed sampler": Fault(
        "no-sampler", [_UNSAMPLED, ("    sampler.set_epoch(epoch)\n", "")], told="RandomSampler"
    ),
    "forgotten set_epoch": Fault(
        "set-epoch", [("    sampler.set_epoch(epoch)\n", "")], told="epoch 2 has the same order"
    ),
    "drop_last": Fault(
        "drop-last",
        [("points(48, 1)", "points(49, 1)"), ("r(train_set)\n", "r(train_set, drop_last=True)\n")],
        told="1 sample of 49 never seen",
    ),
    "padded evaluation": Fault(
        "padded-evaluation",
        [
            (
                "DataLoader(Subset(test_set, range(rank, len(test_set), world)), batch_size=8)",
                "DataLoader(test_set, 8, sampler=DistributedSampler(test_set, shuffle=False))",
            )
        ],
        told="1 sample of 21 counted twice",
    ),
    "mean of unequal means": Fault(
        "mean-of-means", [(" * len(inputs) * world / total", "")], UNEVEN, told="step 4 shares"
    ),
    "mean of unequal metrics": Fault(
        "metric-means",
        [
            ("    dist.all_reduce(right)\n", "    right /= len(test.dataset)\n"),
            (
                "    return right / len(test_set)",
                "    dist.all_reduce(right)\n    return right / world",
            ),
        ],
        told="11 + 10",
    ),
    "schedule per worker": Fault(
        "schedule-per-worker",
        [
            (
                "        scheduler.step()\n",
                "        for _ in range(world):\n            scheduler.step()\n",
            )
        ],
        told="the schedule is stepped",
    ),
    "shuffled on several workers alone": Fault(
        "other-samples",
        [
            ("DistributedSampler(train_set, shuffle=False)", "DistributedSampler(train_set)"),
            ("sampler=sampler)", "sampler=sampler if world > 1 else None)"),
        ],
        IN_ORDER,
        told="drawn by DistributedSampler, shuffled, there by SequentialSampler, not shuffled",
    ),
    "learning rate and batch": Fault(
        "rate-stays", [("batch_size=16 // world", "batch_size=16")], told="32 samples instead of 16"
    ),
    "BatchNorm": Fault(
        "batchnorm-share", [("nn.GroupNorm(4, 16)", "nn.BatchNorm1d(16)")], told="BatchNorm 2"
    ),
    "the same dropout": Fault("same-dropout", [_SEEDED], told="ranks 0 and 1 drop out"),
    "the same augmentation": Fault("same-augmentation", [_SEEDED], AUGMENTED, told="augment"),
    "the same augmentation, in reader processes": Fault(
        "same-augmentation",
        [_SEEDED, ("sampler=sampler)", "sampler=sampler, num_workers=2)")],
        AUGMENTED,
        told="augment",
    ),
    "buffers": Fault(
        "buffers-apart",
        [
            ("            dist.all_reduce(mean)\n", ""),
            ("mean / world", "mean"),
            ("Parallel(model)", "Parallel(model, broadcast_buffers=False)"),
        ],
        told="0.center",
    ),
    "metric": Fault(
        "metric-factor",
        [("return right / len(test_set)", "return right / len(test_set) / world")],
        told="2 times too small",
    ),
    "padded training": Fault(
        "padded-training", [("points(48, 1)", "points(49, 1)")], told="1 sample of 49 seen twice"
    ),
    "batch and learning rate": Fault(
        "batch-grows",
        [("batch_size=16 // world", "batch_size=16"), ("lr=0.1", "lr=0.1 * world")],
        told="the learning rate follows (0.1 on 1 worker, here 0.2)",
    ),
    "learning rate": Fault(
        "rate-differs", [("lr=0.1", "lr=0.1 * world")], told="is 0.2 instead of 0.1"
    ),
    "metric of a share": Fault(
        "metric-share",
        [
            ("    dist.all_reduce(right)\n", ""),
            ("right / len(test_set)", "right / len(test.dataset)"),
        ],
        told="on rank 0's 11 of 21 samples alone",
        code=0,
    ),
    "the same noise": Fault(
        "same-noise",
        [("(model(inputs)", "(model(inputs + 0.1 * torch.randn_like(inputs))")],
        BY_HAND,
        told="draw noise in their steps",
    ),
    "another start": Fault(
        "other-start", [("manual_seed(0)", "manual_seed(world)")], BY_HAND, told="than on 1 worker"
    ),
    "another seed": Fault(
        "start-apart", [("manual_seed(0)", "manual_seed(rank)")], BY_HAND, told="rank 1 begins"
    ),
    "gradients not combined": Fault(
        "weights-apart",
        [("            dist.all_reduce(parameter.grad)\n", "            pass\n")],
        BY_HAND,
        told="after step 1 rank 1",
    ),
}
