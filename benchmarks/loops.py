"""The opponents: training loops as people write them by hand, for the network of a DDP article.

Each is an iterator that takes one optimizer step every time it is asked, and evaluates within the
last step of an epoch. Every worker runs it: collective.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from paceline.data.memory import TensorData
from paceline.data.order import epoch_order
from paceline.models.mnist_cnn import MnistCnn

MEAN, STD = 0.1307, 0.3081
LR = 0.01
CPU = torch.device("cpu")


@dataclass(kw_only=True)
class HandLoop:
    """A loop written by hand, and the model that it trains."""

    model: nn.Module
    """The unwrapped model."""
    steps: Iterator[None]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who takes part, and with how large a batch each."""

    rank: int
    world_size: int
    batch: int


def tuned_loop(
    train: TensorData,
    test: TensorData,
    workers: Workers,
    *,
    bf16: bool = False,
    log_every: int = 50,
) -> HandLoop:
    """Write the loop as well as it can be by hand.

    Tensors in memory, batches made by one gather each, channels-last (real, with one channel too),
    gradients as views of the buckets, no broadcast of buffers, foreach optimizer.

    Args:
        train: Training images.
        test: Images to evaluate on after each epoch.
        workers: Who takes part.
        bf16: Forward in bf16 autocast.
        log_every: Print the loss every so many steps, as such loops do; 0 never does.
    """
    model = MnistCnn().to(memory_format=torch.channels_last)
    net: nn.Module = model
    if workers.world_size > 1:
        net = DistributedDataParallel(
            model,
            gradient_as_bucket_view=True,
            **{_buffers_option(): False},  # type: ignore[arg-type]  # its name depends on torch
        )
    optimizer = torch.optim.Adadelta(model.parameters(), lr=LR, foreach=True)
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    if bf16:
        context = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    parts = _Tuned(net, model, optimizer, context)
    return HandLoop(model=model, steps=_tuned_steps(parts, train, test, workers, log_every))


@dataclass(frozen=True)
class _Tuned:
    net: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager[object]]


def _tuned_steps(
    parts: _Tuned, train: TensorData, test: TensorData, workers: Workers, log_every: int
) -> Iterator[None]:
    net, optimizer, context = parts.net, parts.optimizer, parts.context
    images, labels = train.images[:, 0, :, :, None], train.labels  # (N, H, W, 1)
    factor, offset = 1 / (train.scale * train.std[0]), -train.mean[0] / train.std[0]
    total = workers.batch * workers.world_size
    last = len(images) // total - 1
    for epoch in count():
        order = torch.from_numpy(epoch_order(len(images), 0, epoch))
        for step in range(last + 1):
            start = step * total + workers.rank * workers.batch
            picked = order[start : start + workers.batch]
            x = images.index_select(0, picked).mul(factor).add_(offset).permute(0, 3, 1, 2)
            with context():
                out = net(x)
            loss = F.nll_loss(out.float(), labels.index_select(0, picked))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if log_every and step % log_every == 0 and workers.rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if step == last:
                share = test.images[workers.rank :: workers.world_size, 0, :, :, None]
                batches = (
                    (raw.mul(factor).add_(offset).permute(0, 3, 1, 2), targets)
                    for raw, targets in zip(
                        share.split(2 * workers.batch),
                        test.labels[workers.rank :: workers.world_size].split(2 * workers.batch),
                        strict=True,
                    )
                )
                _evaluate(parts.model, batches, workers, context)
            yield


def article_loop(data_dir: Path, workers: Workers, device: torch.device = CPU) -> HandLoop:
    """Write the loop as a DDP article does: fp32, torchvision's MNIST, transforms by sample.

    Args:
        data_dir: Where `MNIST/raw` holds the four IDX files.
        workers: Who takes part.
        device: This worker's.
    """
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    train_set = datasets.MNIST(str(data_dir), train=True, transform=transform)
    test_set = datasets.MNIST(str(data_dir), train=False, transform=transform)
    model = MnistCnn().to(device)
    steps = _article_steps(model, train_set, test_set, workers, device)
    return HandLoop(model=model, steps=steps)


def _article_steps(
    model: nn.Module,
    train_set: "torch.utils.data.Dataset[tuple[Tensor, int]]",
    test_set: "torch.utils.data.Dataset[tuple[Tensor, int]]",
    workers: Workers,
    device: torch.device,
) -> Iterator[None]:
    rank, world_size = workers.rank, workers.world_size
    sampler = DistributedSampler(train_set, world_size, rank)  # type: ignore[var-annotated]
    loader = DataLoader(train_set, batch_size=workers.batch, sampler=sampler)  # num_workers=0
    test_sampler = DistributedSampler(test_set, world_size, rank, shuffle=False)  # type: ignore[var-annotated]
    test_loader = DataLoader(test_set, batch_size=2 * workers.batch, sampler=test_sampler)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=LR)
    for epoch in count():
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(net(x), y)
            loss.backward()
            optimizer.step()
            if step % 10 == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if step == len(loader) - 1:
                batches = ((x.to(device), y.to(device)) for x, y in test_loader)
                _evaluate(model, batches, workers, nullcontext)
            yield


@torch.no_grad()
def _evaluate(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    workers: Workers,
    context: Callable[[], AbstractContextManager[object]],
) -> None:
    model.eval()
    sums: Tensor | float = 0.0
    for x, y in batches:
        with context():
            out = model(x)
        out = out.float()
        right = (out.argmax(1) == y).sum()
        count = torch.tensor(len(y), device=y.device)
        sums = sums + torch.stack([F.nll_loss(out, y, reduction="sum"), right, count])
    assert isinstance(sums, Tensor)
    model.train()
    if workers.world_size > 1:
        dist.all_reduce(sums)
    if workers.rank == 0:
        print(f"test loss {sums[0] / sums[2]:.4f} accuracy {sums[1] / sums[2]:.2%}", flush=True)


def _buffers_option() -> str:
    """Name DDP's option for the broadcast of buffers, which changed in torch 2.13."""
    import inspect

    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
