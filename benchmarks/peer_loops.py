"""The same training in each library's own idiom, on two workers: what `benchmarks.peers` runs.

    torchrun --nproc-per-node 2 -m benchmarks.peer_loops SIDE JOB STAMPS
    paceline run benchmarks/peer_loops.py --workers 2 -- paceline JOB STAMPS

All have the same network, optimizer, data and samples of a step, in fp32, and evaluate nothing.
Networks of convolutions are channels-last on every side: the faster layout on CPUs.
Samples come from a `DataLoader` in the worker's process, one by one, as tutorials have it; only
`paceline` has its data in memory and changes whole batches, as Paceline's recipes do.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from benchmarks.random_data import PADDING, OneByOne, cifar_shaped, mnist_shaped
from benchmarks.stamps import stamp_steps

WORKERS = 2
VOCABULARY, TOKENS, WIDTH = 96, 64, 128


class CharTransformer(nn.Module):
    """A small causal transformer over characters; (N, T) to (N * T, characters)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next character at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        found = self.layers(self.tokens(tokens) + self.places, mask, is_causal=True)
        scores: Tensor = self.head(found).flatten(0, 1)
        return scores


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, the same by every library."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[], "Dataset[Any]"]
    """Samples one by one."""
    batch: int
    """Samples of a worker in a step."""
    steps: int
    in_memory: Callable[[], tuple[Any, tuple[Any, ...]]]
    """The same data as a `TensorData` or data set, and how Paceline changes whole batches."""


def _channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


def _mnist(samples: int) -> Work:
    from paceline.models.mnist_cnn import MnistCnn

    data = mnist_shaped(samples, 1)
    return Work(
        model=lambda: _channels_last(MnistCnn()),
        optimizer=lambda parameters: Adadelta(parameters, lr=0.01),
        loss=F.nll_loss,
        data=lambda: OneByOne(data, augment=False),
        batch=64,
        steps=samples // (64 * WORKERS),
        in_memory=lambda: (data, ()),
    )


def _wideresnet(samples: int) -> Work:
    from paceline.data.augment import RandomFlip, RandomShift
    from paceline.models.wideresnet import WideResNet

    data = cifar_shaped(samples)
    return Work(
        model=lambda: _channels_last(WideResNet(3, width=1)),
        optimizer=lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
        loss=F.cross_entropy,
        data=lambda: OneByOne(data, augment=True),
        batch=32,
        steps=samples // (32 * WORKERS),
        in_memory=lambda: (data, (RandomShift(PADDING), RandomFlip())),
    )


def _transformer(samples: int) -> Work:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (samples, TOKENS + 1), generator=generator)
    data = TensorDataset(text[:, :-1], text[:, 1:])
    return Work(
        model=CharTransformer,
        optimizer=lambda parameters: AdamW(parameters, lr=3e-4),
        loss=lambda scores, targets: F.cross_entropy(scores, targets.flatten()),
        data=lambda: data,
        batch=16,
        steps=samples // (16 * WORKERS),
        in_memory=lambda: (data, ()),
    )


JOBS: Mapping[str, tuple[Callable[[int], Work], int]] = {
    "mnist": (_mnist, 64 * WORKERS * 120),
    "wideresnet": (_wideresnet, 32 * WORKERS * 30),
    "transformer": (_transformer, 16 * WORKERS * 60),
}
"""By name: the work, and the samples of its only epoch."""


def by_hand(work: Work) -> None:
    """Train with DistributedDataParallel under torchrun, as PyTorch's tutorial does."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    data = work.data()
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    model = nn.parallel.DistributedDataParallel(work.model())
    optimizer = work.optimizer(model.parameters())
    sampler.set_epoch(0)
    for inputs, targets in DataLoader(data, work.batch, sampler=sampler):
        optimizer.zero_grad()
        work.loss(model(inputs), targets).backward()
        optimizer.step()
    dist.destroy_process_group()


def by_lightning(work: Work) -> None:
    """Train with Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):  # type: ignore[misc]  # untyped without it
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, targets = batch
            return work.loss(self.model(inputs), targets)

        def configure_optimizers(self) -> Optimizer:
            return work.optimizer(self.parameters())

    quiet = dict.fromkeys(
        "logger enable_checkpointing enable_progress_bar enable_model_summary".split(), False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=WORKERS, strategy="ddp", max_epochs=1, **quiet
    )
    trainer.fit(Module(), DataLoader(work.data(), work.batch, shuffle=True))


def by_fabric(work: Work) -> None:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    fabric.launch()
    model = work.model()
    model, optimizer = fabric.setup(model, work.optimizer(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(work.data(), work.batch, shuffle=True))
    for inputs, targets in loader:
        optimizer.zero_grad()
        fabric.backward(work.loss(model(inputs), targets))
        optimizer.step()


def by_accelerate(work: Work) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.model()
    model, optimizer, loader = accelerator.prepare(
        model,
        work.optimizer(model.parameters()),
        DataLoader(work.data(), work.batch, shuffle=True),
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(work.loss(model(inputs), targets))
        optimizer.step()


def by_transformers(work: Work) -> None:
    """Train with Hugging Face's Trainer."""
    from tempfile import TemporaryDirectory

    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model()

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": work.loss(self.model(inputs), labels)}

    def collate(samples: list[tuple[Tensor, Any]]) -> dict[str, Tensor]:
        inputs, labels = zip(*samples, strict=True)
        return {
            "inputs": torch.stack(inputs),
            "labels": torch.stack([*map(torch.as_tensor, labels)]),
        }

    model = Model()
    with TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            use_cpu=True,
            num_train_epochs=1,
            per_device_train_batch_size=work.batch,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        optimizer = work.optimizer(model.parameters())
        trainer = Trainer(
            model,
            arguments,
            collate,
            work.data(),
            optimizers=(optimizer, None),
        )
        trainer.train()


def by_paceline_unchanged(work: Work) -> None:
    """Train with Paceline's session, around the DataLoader that a script has."""
    import paceline

    with paceline.session(loader_workers=0) as s:
        net = work.model()
        loader: Any = DataLoader(work.data(), work.batch * WORKERS, shuffle=True)
        model, optimizer, loader = s.prepare(net, work.optimizer(net.parameters()), loader)
        for _ in s.epochs(1):
            for inputs, targets in loader:
                optimizer.zero_grad()
                s.backward(work.loss(model(inputs), targets))
                optimizer.step()


def by_paceline(work: Work) -> None:
    """Train with Paceline's session and its own loader: data in memory, changed by batches."""
    import paceline

    with paceline.session(loader_workers=0) as s:
        model = s.model(work.model())
        s.optimizer(work.optimizer(model.parameters()))
        data, augment = work.in_memory()
        loader: Any = s.loader(data, global_batch=work.batch * WORKERS, augment=augment)
        for _ in s.epochs(1):
            for inputs, targets in loader:
                s.step(work.loss(model(inputs), targets))


SIDES: Mapping[str, Callable[[Work], None]] = {
    "paceline": by_paceline,
    "paceline, DataLoader kept": by_paceline_unchanged,
    "torchrun, by hand": by_hand,
    "Lightning": by_lightning,
    "Fabric": by_fabric,
    "Accelerate": by_accelerate,
    "Transformers": by_transformers,
}


def main() -> None:
    """Train one epoch."""
    side, job, stamps, samples = sys.argv[1:]
    make, _ = JOBS[job]
    torch.manual_seed(0)
    work = make(int(samples))
    stamp_steps(Path(stamps))
    SIDES[side](work)


if __name__ == "__main__":
    main()
