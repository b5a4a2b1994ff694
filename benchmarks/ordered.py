"""The ordered sum of shards (`--shards`) against DistributedDataParallel's all-reduce.

    python -m benchmarks.ordered [--compute-s S] [--congestion NAME] [--only WORDS] [--seconds S]
                                 [--quick] [--check] [--json FILE]

Both train the same network in the same processes, by turns (blocks ABBA); a step is forward,
backward, combine and update, with one shard a worker. The workers are hosts of their own (network
namespaces with links of a given rate; needs root and iproute2), or share loopback.
Hosts wait instead of computing, as ResNet-50 would for a step of S seconds: as if each had
processors of its own. With `--compute-s 0` all of them compute on those of this machine, as workers
on loopback always do.
"""

import inspect
import multiprocessing
import os
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import perf_counter
from typing import Any, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not declared there
from torch.nn.parallel import DistributedDataParallel

from benchmarks.emulated import Emulated, resnet50
from benchmarks.figures import Figure, Report, median_figure, parser, ratios
from benchmarks.ordered_hosts import congestion_controls, enter, hosts, sent_bytes, why_not
from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.gradient_sync.ordered.reduce import OrderedSum
from paceline.models.wideresnet import WideResNet

WORLDS = (2, 4, 8)
LINKS = (1000, 400, 200)
"""Mbit/s."""
BATCH = 1
"""Samples a worker: little to compute, so that the exchange is what is measured."""
COMPUTE_S = 0.2
CONGESTION = "cubic"
"""Linux's default. All-to-all is slower with BBR, which some machines have instead."""
MOST_ON_LINKS, MOST_WITHIN_NODE, MOST_BYTES = 1.05, 1.0, 1.02
_WARM_UP = 3
_FIRST_STEPS = 24
"""Of the ordered sum, in which it finds out how finely to cut."""
_LEAST_PAIRS = 6

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where is measured."""

    workers: int
    link: int | None
    """Mbit/s; None for loopback."""
    seconds: float
    compute_s: float = 0.0
    """Of an emulated step; 0 where it is computed."""
    congestion: str = CONGESTION
    """TCP's congestion control on links."""

    @property
    def title(self) -> str:
        """Name it."""
        where = "loopback" if self.link is None else f"{self.link} Mbit/s"
        return f"{self.workers} workers, {where}"

    @property
    def interface(self) -> str:
        """Name the interface by which the workers meet."""
        return "lo" if self.link is None else "eth0"


@dataclass(kw_only=True)
class Side:
    """What rank 0 measured of one side."""

    step_s: list[float] = field(default_factory=list)
    """Of each block."""
    sent: list[float] = field(default_factory=list)
    """Bytes a step and worker, of each block."""


@final
class Network(nn.Module):
    """2.7 million parameters in 47 tensors of all sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = WideResNet(3, width=4)
        self.images = torch.randn(BATCH, 3, 32, 32)
        self.labels = torch.zeros(BATCH, dtype=torch.int64)

    def forward(self) -> torch.Tensor:
        return F.cross_entropy(self.body(self.images), self.labels)


@final
class Waiting(nn.Module):
    """ResNet-50 with a quarter of the channels (and of DDP's buckets), which only waits."""

    def __init__(self, compute_s: float, rank: int) -> None:
        super().__init__()
        shape = resnet50()
        self.body = Emulated(shape, compute_s, rank)
        self.bucket_mb = shape.bucket_bytes / 2**20

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.body(torch.zeros(1, requires_grad=True))
        return loss


def network_of(setting: Setting, rank: int) -> nn.Module:
    """Make what is trained."""
    return Waiting(setting.compute_s, rank) if setting.compute_s else Network()


def all_reduced(trained: nn.Module) -> Step:
    """Make a step of plain DistributedDataParallel."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    network = DistributedDataParallel(
        trained,
        bucket_cap_mb=trained.bucket_mb if isinstance(trained, Waiting) else None,
        gradient_as_bucket_view=True,
        **{buffers: False},  # type: ignore[arg-type]  # its name depends on torch's version
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        network().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ordered(network: nn.Module, group: Group) -> Step:
    """Make a step of the ordered sum."""
    parameters = dict(network.named_parameters())
    gradients = OrderedSum(group, group.world_size)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        gradients.begin_step(parameters)
        loss = network() / group.world_size
        gradients.open_shard(group.rank)
        loss.backward()
        gradients.close_shard()
        gradients.finish()
        optimizer.step()
        optimizer.zero_grad()

    return step


def contest(setting: Setting, group: Group) -> tuple[Side, Side]:
    """Run the two sides by turns. Collective."""
    steps = (
        ordered(network_of(setting, group.rank), group),
        all_reduced(network_of(setting, group.rank)),
    )
    sides = Side(), Side()
    for _ in range(_FIRST_STEPS):
        steps[0]()
    for step in (*steps, *steps):
        for _ in range(_WARM_UP):
            step()
    block, pairs = _agreed_lengths(steps[1], setting, group)
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            _measure(steps[side], block, sides[side], setting, group)
    return sides


def _agreed_lengths(step: Step, setting: Setting, group: Group) -> tuple[int, int]:
    """Choose steps a block and pairs of blocks by rank 0's clock. Collective."""
    group.barrier()
    since = perf_counter()
    for _ in range(_WARM_UP):
        step()
    step_s = (perf_counter() - since) / _WARM_UP
    block = max(2, round(0.4 / step_s))
    pairs = max(_LEAST_PAIRS, round(setting.seconds / (2 * block * step_s)))
    lengths = group.broadcast_(torch.tensor([block, pairs])).tolist()
    return lengths[0], lengths[1]


def _measure(step: Step, block: int, side: Side, setting: Setting, group: Group) -> None:
    group.barrier()
    before, since = sent_bytes(setting.interface), perf_counter()
    for _ in range(block):
        step()
    group.barrier()
    side.step_s.append((perf_counter() - since) / block)
    sharing = group.world_size if setting.link is None else 1
    own = torch.tensor([(sent_bytes(setting.interface) - before) / block / sharing])
    side.sent.append(float(group.gather_rows(own).mean()))


def measure(setting: Setting) -> tuple[Side, Side]:
    """Run a setting on forked workers."""
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    with _places(setting) as places, tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        ranks = [
            context.Process(target=_rank, args=(rank, place, setting, store, far))
            for rank, place in enumerate(places)
        ]
        found: tuple[Side, Side] = answer_of(ranks, near)
    return found


def answer_of(ranks: Sequence[BaseProcess], near: Connection) -> Any:
    """Run ranks to their end.

    Args:
        ranks: Processes that aren't started yet.
        near: Where one of them sends what it has found.

    Returns:
        That.

    Raises:
        RuntimeError: One of them failed, or none has sent anything.
    """
    for process in ranks:
        process.start()
    found = None
    while any(process.is_alive() for process in ranks):
        if near.poll(0.2):
            found = near.recv()
    if found is None or any(process.exitcode for process in ranks):
        raise RuntimeError("a worker failed; its error is above")
    return found


@contextmanager
def _places(setting: Setting) -> Iterator[list[str]]:
    if setting.link is None:
        yield [""] * setting.workers
        return
    with hosts(setting.workers, setting.link, congestion=setting.congestion) as names:
        yield names


def _rank(rank: int, place: str, setting: Setting, store: Path, results: Connection) -> None:
    torch.set_num_threads(1)
    if place:
        enter(place)
    os.environ["GLOO_SOCKET_IFNAME"] = setting.interface
    number = setting.workers
    meeting = FileStore(str(store), number)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=number)
    node, nodes = (0, 1) if setting.link is None else (rank, number)
    placement = Placement(rank=rank, world_size=number, node_rank=node, nodes=nodes)
    sides = contest(setting, Group(placement, torch.device("cpu"), "gloo"))
    if rank == 0:
        results.send(sides)
    dist.destroy_process_group()


def figures(setting: Setting, ours: Side, theirs: Side) -> list[Figure]:
    """Compare the sides of a setting with the gates."""
    most = MOST_WITHIN_NODE if setting.link is None else MOST_ON_LINKS
    ms = [1000 * statistics.median(side.step_s) for side in (ours, theirs)]
    megabytes = [statistics.median(side.sent) / 1e6 for side in (ours, theirs)]
    return [
        median_figure(
            f"{setting.title}: time",
            ratios(ours.step_s, theirs.step_s),
            "x",
            at_most=most,
            note=f"{ms[0]:.1f} against {ms[1]:.1f} ms a step",
        ),
        median_figure(
            f"{setting.title}: bytes",
            ratios(ours.sent, theirs.sent),
            "x",
            at_most=MOST_BYTES,
            note=f"{megabytes[0]:.2f} against {megabytes[1]:.2f} MB a step and worker",
        ),
    ]


def remarks_on_links(compute_s: float, congestion: str) -> Iterator[str]:
    """Say what the hosts' links are like, and what is trained there."""
    yield f"on links TCP with {congestion}"
    if compute_s:
        size = resnet50().bytes // 4
        yield f"on links {size / 1e6:.1f} million, {compute_s:g} s of emulated computation a step"


def main() -> int:
    """Measure all settings that are possible here."""
    about = parser(__doc__ or "")
    about.add_argument("--only", default="", help="settings whose title has these words")
    about.add_argument("--seconds", type=float, default=20.0, help="of measuring a setting")
    about.add_argument(
        "--compute-s",
        type=float,
        default=COMPUTE_S,
        help="on links, wait so long a step instead of computing; 0 to compute",
    )
    about.add_argument(
        "--congestion",
        default=CONGESTION,
        choices=sorted({CONGESTION, *congestion_controls()}),
        help="TCP's congestion control on links",
    )
    arguments = about.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces are removed
    missing = why_not()
    size = sum(parameter.numel() for parameter in Network().parameters())
    report = Report(name="ordered", remarks=[f"{size / 1e6:.1f} million parameters, batch {BATCH}"])
    if missing:
        report.remarks.append(f"{missing}: only loopback was measured")
    else:
        report.remarks += remarks_on_links(arguments.compute_s, arguments.congestion)
    links: tuple[int | None, ...] = (None,) if missing else (*LINKS, None)
    for workers in WORLDS[:2] if arguments.quick else WORLDS:
        for link in links[-2:] if arguments.quick else links:
            setting = Setting(
                workers=workers,
                link=link,
                seconds=2.0 if arguments.quick else arguments.seconds,
                compute_s=0.0 if link is None else arguments.compute_s,
                congestion=arguments.congestion,
            )
            if arguments.only in setting.title:
                sides = measure(setting)
                report.figures += figures(setting, *sides)
                report.raw[setting.title] = [vars(side) for side in sides]
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
