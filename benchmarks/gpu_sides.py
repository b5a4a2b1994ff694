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
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Literal, Self, cast, final

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arena import (
    MNIST_SETTINGS,
    SEED,
    EnoughError,
    paused,
    run_gated,
    training_of,
    worker_group,
)
from benchmarks.loops import HandLoop, Workers, article_loop
from benchmarks.mnist_shaped import mnist_shaped, write_mnist_shaped
from paceline.data.memory import TensorData, synthetic_images
from paceline.distributed.group import Group
from paceline.models.mnist_cnn import MnistCnn
from paceline.models.wideresnet import WideResNet
from paceline.options.fields import OptionValue
from paceline.results.run_directory import RunDirectory
from paceline.training.job import Job

By = Literal["paceline", "hand", "article"]
Network = Literal["resnet50", "wideresnet", "transformer", "mnist"]
_LR, _MOMENTUM, _CLASSES = 0.01, 0.9, 10
_START_S = 600.0
"""Most that a side may take to build its network and take its first block."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a side trains, and how."""

    by: By
    network: Network
    precision: Literal["fp32", "bf16"] = "bf16"
    shards: int | None = None
    graphs: bool = False
    """With `--cuda-graphs on`."""
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

    def settings(self, workers: int) -> Mapping[str, OptionValue]:
        """Give Paceline's options; by hand the same is written out."""
        mine: Mapping[str, OptionValue] = {
            "precision": self.precision,
            "shards": self.shards,
            "cuda_graphs": "on" if self.graphs else "off",
            "global_batch": self.batch * workers,
        }
        if self.network == "mnist":
            return {**MNIST_SETTINGS, **mine}
        sgd: Mapping[str, OptionValue] = {"optimizer": "sgd", "lr": _LR, "momentum": _MOMENTUM}
        return {**MNIST_SETTINGS, **sgd, **mine}


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
    workers = int(os.environ["WORLD_SIZE"])
    if case.by == "paceline":
        with worker_group(case.settings(workers)) as group:
            _paceline(case, pipe, place, group)
        return
    with _hand_group() as group:
        torch.manual_seed(SEED)
        loop = _article(case, place, group) if case.by == "article" else _by_hand(case, group)
        for _ in _blocks(pipe, group.device):
            for _ in range(case.block_steps):
                next(loop.steps)


def _paceline(case: Case, pipe: Connection, place: Path, group: Group) -> None:
    run = RunDirectory.named(place / "run")
    if group.rank == 0:
        run.create()
    group.barrier()
    workers = group.world_size

    def job() -> Job:
        return Job(
            model=case.model(),
            train=case.data(workers, 1, case.epoch_steps),
            validation=case.data(workers, 2, 1),
            loss="nll" if case.network == "mnist" else "cross_entropy",
        )

    with training_of(job, case.settings(workers), run, group) as training:
        blocks = _blocks(pipe, group.device)

        def between() -> None:
            training.session.engine.snapshots.flush()
            with paused(training):
                try:
                    next(blocks)
                except StopIteration:
                    raise EnoughError from None

        run_gated(training, case.block_steps, between)


@contextmanager
def _hand_group() -> Iterator[Group]:
    """Join as people do by hand; nothing of Paceline's but the names of things."""
    import torch.distributed as dist

    from paceline.distributed.environment import current_placement

    placement = current_placement()
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        yield Group(placement, device, "nccl")
    finally:
        dist.destroy_process_group()


def _article(case: Case, place: Path, group: Group) -> HandLoop:
    workers = group.world_size
    if group.rank == 0:
        write_mnist_shaped(place, case.epoch_steps * case.batch * workers, case.batch * workers)
    group.barrier()
    who = Workers(rank=group.rank, world_size=workers, batch=case.batch)
    return article_loop(place, who, group.device)


def _by_hand(case: Case, group: Group) -> HandLoop:
    """Write the loop as well as it can be by hand: the same options, the data on the GPU."""
    model = case.model().to(group.device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # not declared
    return HandLoop(model=model, steps=_hand_steps(case, model, group))


def _hand_steps(case: Case, model: nn.Module, group: Group) -> Iterator[None]:
    device, workers = group.device, group.world_size
    net: nn.Module = model
    if workers > 1:
        net = DistributedDataParallel(
            model, device_ids=[device.index], gradient_as_bucket_view=True
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM, fused=True)
    data = case.data(workers, 1, case.epoch_steps)
    images = data.images.to(device).contiguous(memory_format=torch.channels_last)
    labels = data.labels.to(device)
    factor, offset = 1 / (data.scale * data.std[0]), -data.mean[0] / data.std[0]
    draw = torch.Generator(device).manual_seed(SEED)
    while True:
        order = torch.randperm(len(images), device=device, generator=draw)
        for picked in order.split(case.batch)[group.rank :: workers]:
            x = images.index_select(0, picked).mul(factor).add_(offset)
            with torch.autocast("cuda", torch.bfloat16, enabled=case.precision == "bf16"):
                loss = F.cross_entropy(net(x), labels.index_select(0, picked))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield
