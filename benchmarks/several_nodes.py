"""Gradients over several nodes with several workers each: by leaders, against all workers alike.

    python -m benchmarks.several_nodes [--compute-s S] [--only WORDS] [--pairs N] [--quick]
                                       [--check] [--json FILE]

The ordered sum of `--shards`: workers of a node add up their gradients in its memory, and leaders
exchange the sums; on the other side every worker exchanges its own. Both train the same network in
the same processes, by turns (blocks ABBA). Nodes are network namespaces with links of a given rate
(needs root and iproute2); workers wait S seconds a step instead of computing.
"""

import multiprocessing
import os
import signal
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not declared there

from benchmarks.emulated import Emulated, Shape, resnet50, vgg19, wake_exactly
from benchmarks.figures import Figure, Report, median_figure, parser, ratios
from benchmarks.ordered import Step, answer_of
from benchmarks.ordered_hosts import enter, hosts, sent_bytes, why_not
from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.gradient_sync.ordered.reduce import OrderedSum

NODES = ((2, 2), (2, 4), (4, 2))
"""How many, and workers of each."""
LINKS = (100, 1000, 10000)
"""Mbit/s."""
NETWORKS: dict[str, Callable[[], Shape]] = {"6 MB": resnet50, "35 MB": lambda: vgg19(thinner=4)}
_FIRST_STEPS = 26
"""In which the ordered exchange finds out how finely to cut."""
_WARM_UP = 2
_BLOCK_S = 0.4


@dataclass(kw_only=True)
class Side:
    """What rank 0 measured of one side; of each block, a step."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU time of a worker, on average."""
    sent: list[float] = field(default_factory=list)
    """Bytes that leave its node."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where is measured."""

    nodes: int
    per_node: int
    link: int
    """Mbit/s."""
    network: str
    pairs: int
    compute_s: float

    @property
    def title(self) -> str:
        """Name it."""
        return f"{self.nodes} x {self.per_node} workers, {self.link} Mbit/s, {self.network}"


def ordered(model: nn.Module, group: Group, *, by_leaders: bool) -> Step:
    """Make a step, with a shard for each worker."""
    if not by_leaders:  # as if every worker had a node of its own
        rank, size = group.rank, group.world_size
        alone = Placement(rank=rank, world_size=size, node_rank=rank, nodes=size)
        group = Group(alone, group.device, group.backend)
    total, images = OrderedSum(group, group.world_size), torch.zeros(1, requires_grad=True)
    parameters = dict(model.named_parameters())

    def step() -> None:
        total.begin_step(parameters)
        loss = model(images)
        total.open_shard(group.rank)
        loss.backward()
        total.close_shard()
        total.finish()

    return step


def contest(setting: Setting, group: Group) -> tuple[Side, Side, bool]:
    """Run both sides by turns; say whether their sums have the same bits. Collective."""
    shape = NETWORKS[setting.network]()
    models = [Emulated(shape, setting.compute_s, group.rank) for _ in range(2)]
    steps = [ordered(m, group, by_leaders=not place) for place, m in enumerate(models)]
    for step in steps:
        for _ in range(_FIRST_STEPS):
            step()
    same = all(map(torch.equal, *(_gradients(model) for model in models)))
    same = bool(group.gather_rows(torch.tensor([same])).all())
    block = _agreed_block(steps[1], group)
    sides = Side(), Side()
    for pair in range(setting.pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            for _ in range(_WARM_UP):
                steps[side]()
            _measure(steps[side], block, sides[side], group)
    return *sides, same


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _agreed_block(step: Step, group: Group) -> int:
    """Choose the steps of a block by rank 0's clock. Collective."""
    group.barrier()
    since = perf_counter()
    for _ in range(_WARM_UP):
        step()
    step_s = (perf_counter() - since) / _WARM_UP
    return int(group.broadcast_(torch.tensor([max(2, round(_BLOCK_S / step_s))])))


def _measure(step: Step, block: int, side: Side, group: Group) -> None:
    group.barrier()
    before, since, cpu = sent_bytes("eth0"), perf_counter(), process_time()
    for _ in range(block):
        step()
    own_cpu = torch.tensor([(process_time() - cpu) / block], dtype=torch.float64)
    side.cpu_s.append(float(group.gather_rows(own_cpu).mean()))
    side.step_s.append((perf_counter() - since) / block)
    side.sent.append((sent_bytes("eth0") - before) / block)


def measure(setting: Setting) -> tuple[Side, Side, bool]:
    """Run a setting on forked workers."""
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    links = hosts(setting.nodes, setting.link, congestion="cubic")
    with links as names, tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        ranks = [
            context.Process(target=_rank, args=(rank, names, setting, store, far))
            for rank in range(setting.nodes * setting.per_node)
        ]
        found: tuple[Side, Side, bool] = answer_of(ranks, near)
    return found


def _rank(rank: int, names: list[str], setting: Setting, store: Path, results: Connection) -> None:
    torch.set_num_threads(1)
    wake_exactly()
    node, local_rank = divmod(rank, setting.per_node)
    enter(names[node])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    number = setting.nodes * setting.per_node
    meeting = FileStore(str(store), number)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=number)
    placement = Placement(
        rank=rank,
        world_size=number,
        local_rank=local_rank,
        local_world_size=setting.per_node,
        node_rank=node,
        nodes=setting.nodes,
    )
    found = contest(setting, Group(placement, torch.device("cpu"), "gloo"))
    if rank == 0:
        results.send(found)
    dist.destroy_process_group()


def figures(setting: Setting, ours: Side, theirs: Side, *, same: bool) -> list[Figure]:
    """Compare the sides of a setting."""
    ms, cpu_ms = [
        [1000 * statistics.median(times) for times in pair]
        for pair in ((ours.step_s, theirs.step_s), (ours.cpu_s, theirs.cpu_s))
    ]
    sent = [statistics.median(side.sent) / 1e6 for side in (ours, theirs)]
    notes = [
        f"{ms[0]:.1f} against {ms[1]:.1f} ms a step",
        f"{cpu_ms[0]:.1f} against {cpu_ms[1]:.1f} ms of a worker's CPU time",
        f"{sent[0]:.2f} against {sent[1]:.2f} MB a node",
        *(["the same bits"] if same else []),
    ]
    speed = ratios(theirs.step_s, ours.step_s)
    return [median_figure(setting.title, speed, "x", at_least=1.0, note=", ".join(notes))]


def main() -> int:
    """Measure all settings."""
    about = parser(__doc__ or "")
    about.add_argument("--only", default="", help="settings with all of these words;words")
    about.add_argument("--pairs", type=int, default=8, help="of blocks, of each setting")
    about.add_argument("--compute-s", type=float, default=0.0, help="of a step, emulated")
    arguments = about.parse_args()
    missing = why_not()
    if missing:
        print(missing)
        return 2
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces are removed
    sizes = ", ".join(f"{make().bytes / 1e6:.1f} MB" for make in NETWORKS.values())
    remarks = [f"gradients of {sizes}; {arguments.compute_s:g} s of emulated computation a step"]
    report = Report(name="several_nodes", remarks=remarks)
    for setting in [
        Setting(
            nodes=nodes,
            per_node=per_node,
            link=link,
            network=network,
            pairs=2 if arguments.quick else arguments.pairs,
            compute_s=arguments.compute_s,
        )
        for nodes, per_node in NODES[: 1 if arguments.quick else None]
        for link in LINKS[1 if arguments.quick else 0 : 2 if arguments.quick else None]
        for network in list(NETWORKS)[: 1 if arguments.quick else None]
    ]:
        if all(word in setting.title for word in arguments.only.split(";")):
            ours, theirs, same = measure(setting)
            report.figures += figures(setting, ours, theirs, same=same)
            report.raw[setting.title] = [vars(ours), vars(theirs)]
            print(report.figures[-1].cells(), flush=True)
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
