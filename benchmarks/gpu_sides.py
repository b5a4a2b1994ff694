"""The sides of a comparison on GPUs: trainings in processes of their own that go on when told to.

A side is one process for each GPU it uses. Two sides stay apart, since what `--shards` switches
(which kernels are taken) holds for a whole process; they run by turns, so that one has the GPU.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self, cast, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from benchmarks.random_data import MEAN, STD, mnist_shaped, write_mnist_shaped
from paceline.data.memory import TensorData, synthetic_images
from paceline.models.mnist_cnn import MnistCnn
from paceline.models.wideresnet import WideResNet

By = Literal["paceline", "hand", "article"]
Network = Literal["resnet50", "wideresnet", "transformer", "mnist"]
_LR, _MOMENTUM, _CLASSES, _SEED = 0.01, 0.9, 10, 0
_START_S = 600.0
"""Most that a side may take to build its network and take its first block."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a side trains, and how."""

    by: By
    network: Network
    precision: Literal["fp32", "bf16"] = "bf16"
    shards: int | None = None
    batch: int
    """Samples of each worker in a step."""
    size: int
    """Height and width of the images."""
    block_steps: int
    epoch_steps: int
    tiny: bool = False
    """The network's smallest form, for trying things out."""

    def tried_out(self) -> "Case":
        """Give its smallest form, whose figures mean nothing."""
        short = replace(self, block_steps=1, epoch_steps=8)
        return short if self.network == "mnist" else replace(short, batch=8, size=32, tiny=True)

    def model(self) -> nn.Module:
        """Build the network."""
        return MODELS[self.network](self)

    def data(self, workers: int, seed: int, steps: int) -> TensorData:
        """Make as many random images as so many steps take."""
        samples = steps * self.batch * workers
        if self.network == "mnist":
            return mnist_shaped(samples, seed)
        shape = {"channels": 3, "height": self.size, "width": self.size, "classes": _CLASSES}
        return synthetic_images(samples, seed=seed, **shape)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer: Paceline's and the one by hand are the same."""
        if self.network == "mnist":
            return torch.optim.Adadelta(model.parameters(), lr=_LR)
        return torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM, fused=True)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss; the article's network gives log-probabilities."""
        return (F.nll_loss if self.network == "mnist" else F.cross_entropy)(outputs, targets)


def _resnet50(case: Case) -> nn.Module:
    import torchvision

    build = torchvision.models.resnet18 if case.tiny else torchvision.models.resnet50
    model: nn.Module = build(num_classes=_CLASSES)
    return model


def _transformer(case: Case) -> nn.Module:
    """Build ViT-B/16."""
    import torchvision

    whole = {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "mlp_dim": 3072}
    tiny = {"num_layers": 1, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    model: nn.Module = torchvision.models.VisionTransformer(
        image_size=case.size,
        patch_size=16,
        num_classes=_CLASSES,
        **(tiny if case.tiny else whole),
    )
    return model


MODELS: Mapping[Network, Callable[[Case], nn.Module]] = {
    "resnet50": _resnet50,
    "wideresnet": lambda case: WideResNet(3, width=1 if case.tiny else 10),
    "transformer": _transformer,
    "mnist": lambda _: MnistCnn(),
}


@final
class Side:
    """A training that runs a block of steps whenever it is asked to; a context manager."""

    def __init__(self, case: Case, workers: int, scratch: Path) -> None:
        """Start its processes.

        Args:
            case: What they do.
            workers: How many there are, each with a GPU of its own.
            scratch: For what it leaves: a run directory, data, output.
        """
        context = multiprocessing.get_context("spawn")
        self.case = case
        self._pipes: list[Connection] = []
        self._processes = []
        place, port = Path(tempfile.mkdtemp(dir=scratch)), get_free_port()
        for rank in range(workers):
            near, far = context.Pipe()
            told = (asdict(case), rank, workers, port, str(place), far)
            process = context.Process(target=_serve, args=told, daemon=True)
            process.start()
            far.close()
            self._pipes.append(near)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0 if kind else 30)
            process.kill()
            process.join()

    def wait(self) -> None:
        """Wait until it is ready for its first block.

        Raises:
            RuntimeError: It failed.
        """
        self._answers()

    def block(self) -> float:
        """Have it take a block of steps; gives the first worker's seconds, the GPU's work included.

        Raises:
            RuntimeError: It failed.
        """
        for pipe in self._pipes:
            with suppress(OSError):  # one that has failed says why when it is asked
                pipe.send("block")
        return float(cast(float, self._answers()[0]))

    def peak_bytes(self) -> int:
        """End it; gives the most memory that tensors of a worker ever took."""
        for pipe in self._pipes:
            pipe.send("end")
        return max(int(cast(int, answer)) for answer in self._answers())

    def _answers(self) -> list[object]:
        answers = []
        for pipe in self._pipes:
            try:
                if not pipe.poll(_START_S):
                    raise RuntimeError(f"no answer in {_START_S:.0f} s")
                answer: object = pipe.recv()
            except (EOFError, OSError) as error:
                raise RuntimeError("a process ended without a word") from error
            if isinstance(answer, str):
                raise RuntimeError(answer)
            answers.append(answer)
        return answers


def _blocks(pipe: Connection, device: torch.device) -> Iterator[None]:
    """Yield for each block that is asked for; a block lasts until the next one is wanted.

    Answers with the seconds of each, and at the end with the most memory that was taken.
    """
    pipe.send(0.0)
    while pipe.recv() == "block":
        started_s = perf_counter()
        yield
        torch.accelerator.synchronize(device)
        pipe.send(perf_counter() - started_s)
    pipe.send(torch.cuda.max_memory_allocated(device))


def _serve(
    told: Mapping[str, object], rank: int, workers: int, port: int, place: str, pipe: Connection
) -> None:
    case = Case(**told)  # type: ignore[arg-type]  # what asdict gave
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        with (Path(place) / f"output-{rank}.txt").open("w") as output, redirect_stdout(output):
            _run(case, pipe, Path(place))
    except EOFError:  # who asked is gone
        sys.exit(1)
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is told
        with suppress(OSError):
            pipe.send(f"{case.by}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        sys.exit(1)


def _run(case: Case, pipe: Connection, place: Path) -> None:
    if case.by == "paceline":
        _paceline(case, pipe, place)
        return
    # Join as people do by hand.
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(_SEED)
    if case.by == "article":
        steps = _article_steps(case, place, device, rank, workers)
    else:
        steps = _hand_steps(case, device, rank, workers)
    for _ in _blocks(pipe, device):
        for _ in range(case.block_steps):
            next(steps)
    dist.destroy_process_group()


def _paceline(case: Case, pipe: Connection, place: Path) -> None:
    """Train with a session; between blocks it stands still."""
    workers = int(os.environ["WORLD_SIZE"])
    data = case.data(workers, 1, case.epoch_steps)
    options: Any = {"precision": case.precision, "shards": case.shards, "progress": "off"}
    with paceline.session(place / "run", seed=_SEED, **options) as s:
        net = case.model().to(memory_format=torch.channels_last)
        model = s.model(net)
        s.optimizer(case.optimizer(net))
        loader: Any = s.loader(data, global_batch=case.batch * workers)
        blocks, taken = _blocks(pipe, s.device), 0
        for _ in s.epochs(1_000_000):
            for inputs, targets in loader:
                is_block_done = taken % (case.block_steps * (case.shards or 1)) == 0
                if is_block_done and next(blocks, blocks) is blocks:
                    return
                taken += 1
                s.step(case.loss(model(inputs), targets))


def _article_steps(
    case: Case, place: Path, device: torch.device, rank: int, workers: int
) -> Iterator[None]:
    """Train as a DDP article does: torchvision's MNIST, transforms by sample."""
    from torchvision import datasets, transforms

    if rank == 0:
        write_mnist_shaped(place, case.epoch_steps * case.batch * workers, case.batch * workers)
    dist.barrier()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
    train_set = datasets.MNIST(str(place), train=True, transform=transform)
    sampler = DistributedSampler(train_set, workers, rank)  # type: ignore[var-annotated]
    loader = DataLoader(train_set, batch_size=case.batch, sampler=sampler)  # num_workers=0
    model = case.model().to(device)
    net = DistributedDataParallel(model)
    optimizer = case.optimizer(model)
    for epoch in count():
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(net(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            if step % 10 == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            yield


def _hand_steps(case: Case, device: torch.device, rank: int, workers: int) -> Iterator[None]:
    """Train as well as it can be done by hand: the same options, the data on the GPU."""
    model = case.model().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # not declared
    net: nn.Module = model
    if workers > 1:
        net = DistributedDataParallel(
            model, device_ids=[device.index], gradient_as_bucket_view=True
        )
    optimizer = case.optimizer(model)
    data = case.data(workers, 1, case.epoch_steps)
    images = data.images.to(device).contiguous(memory_format=torch.channels_last)
    labels = data.labels.to(device)
    factor, offset = 1 / (data.scale * data.std[0]), -data.mean[0] / data.std[0]
    draw = torch.Generator(device).manual_seed(_SEED)
    while True:
        order = torch.randperm(len(images), device=device, generator=draw)
        for picked in order.split(case.batch)[rank::workers]:
            x = images.index_select(0, picked).mul(factor).add_(offset)
            with torch.autocast("cuda", torch.bfloat16, enabled=case.precision == "bf16"):
                loss = case.loss(net(x), labels.index_select(0, picked))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield
