"""Every way of combining gradients on 1, 2, 4 and 8 hosts whose links hold them up.

    python -m benchmarks.scaling [--quick] [--repeats N] [--mbit-per-s 89] [--check] [--json FILE]

The hosts are network namespaces (needs root and iproute2) with links of a rate at which plain
all-reduce reaches an efficiency of 0.46 on 8 of them, as in a study on EC2. Their computation is
EMULATED by waits, since all of them share this machine's cores; gradients of a VGG-19 thinned to a
sixty-fourth, their order and their way over the network are real.
"""

import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import final

from benchmarks.emulated import vgg19
from benchmarks.figures import Figure, Report, markdown, median_figure, parser
from benchmarks.fleet import Fleet, fleet
from benchmarks.ordered_hosts import why_not
from benchmarks.trials import Outcome, Settings, Trial, run, serve

NETWORK = "vgg19"
SIZES = (1, 2, 4, 8)
TARGET, WITHIN = 0.46, 0.03
COMPUTE_S = 0.8
"""About what a step of the EC2 study took: 0.81 s."""
_RATE = 89.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of combining gradients, and which of its steps are measured."""

    name: str
    settings: Settings
    lead: int = 2
    """Steps before: until it does what it does for good."""
    steps: int = 6


def power(rank: int) -> Method:
    """PowerSGD after its warm-up."""
    settings: Settings = {"sync": "powersgd", "powersgd_rank": rank, "sync_warmup_steps": 2}
    return Method(name=f"PowerSGD, rank {rank}", settings=settings, lead=4)


PLAIN = Method(name="all-reduce", settings={"sync": "allreduce"})
BF16 = Method(name="bf16", settings={"sync": "allreduce", "sync_precision": "bf16"})
METHODS = (PLAIN, BF16, power(4), power(1))


@final
@dataclass(kw_only=True)
class Row:
    """A method on so many hosts."""

    workers: int
    method: str
    outcomes: list[Outcome] = field(default_factory=list)

    def efficiencies(self, alone_s: float) -> list[float]:
        """Compare with one host that has nobody to talk to, one for each repeat."""
        return [alone_s / outcome.step_s for outcome in self.outcomes]

    def cells(self, alone_s: float) -> tuple[str, ...]:
        """Give the cells of its row in the table."""
        sent = statistics.median(o.sent_bytes for o in self.outcomes)
        return (
            str(self.workers),
            self.method,
            _spread([1000 * outcome.step_s for outcome in self.outcomes], "{:.0f}"),
            _spread(self.efficiencies(alone_s), "{:.3f}"),
            f"{sent / 1e6:.2f}",
            _spread([held_up(o) for o in self.outcomes], "{:.0%}"),
            str(len(self.outcomes)),
        )


_HEADER = ("hosts", "method", "step, ms", "efficiency", "MB sent", "held up", "n")


def held_up(outcome: Outcome) -> float:
    """Give the share of a step that waits for communication, by the training's own profile."""
    parts = outcome.profile.parts
    total = sum(getattr(parts, part.name) for part in fields(parts))
    return float((parts.exposed + parts.waiting) / total)


def contest(
    hosts: Fleet, sizes: Sequence[int], methods: Sequence[Method], repeats: int, compute_s: float
) -> Iterator[tuple[int, str, Outcome]]:
    """Measure everything in turn, in another order in each round."""
    pairs = [(n, m) for n in sizes for m in methods if m is PLAIN or n > 1]
    for number in range(repeats):
        for workers, method in pairs if number % 2 else reversed(pairs):
            trial = Trial(
                network=NETWORK,
                compute_s=compute_s,
                workers=workers,
                settings=method.settings,
                lead=method.lead,
                steps=method.steps,
            )
            name = f"round {number + 1}, {workers} hosts, {method.name}"
            yield workers, method.name, run(trial, hosts, name)


def judge(rows: Mapping[tuple[int, str], Row], alone_s: float, *, gates: bool) -> list[Figure]:
    """Compare with what is wanted on the most hosts."""
    workers = max(n for n, _ in rows)
    figures = []
    for (number, method), row in rows.items():
        if number == workers:
            title = f"efficiency of {method} on {workers} hosts"
            figures.append(median_figure(title, row.efficiencies(alone_s), ""))
    off = abs(statistics.median(rows[workers, PLAIN.name].efficiencies(alone_s)) - TARGET)
    most = WITHIN if gates else None
    return [
        *figures,
        Figure(what=f"all-reduce away from {TARGET}", value=off, unit="", at_most=most),
    ]


def _spread(values: Sequence[float], form: str) -> str:
    middle, low, high = map(form.format, (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def main() -> int:
    """Measure and report."""
    about = parser(__doc__ or "")
    about.add_argument("--repeats", type=int, default=3)
    about.add_argument("--mbit-per-s", type=float, default=_RATE, help="of the links")
    about.add_argument("--only", default="", help="methods whose name has these words")
    arguments = about.parse_args()
    missing = why_not()
    if missing:
        print(f"nothing was measured: {missing}")
        return 1 if arguments.check else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces are removed
    methods = [m for m in METHODS if m is PLAIN or arguments.only in m.name]
    sizes: Sequence[int] = SIZES
    repeats, compute_s = arguments.repeats, COMPUTE_S
    if arguments.quick:
        sizes, repeats, compute_s, methods = SIZES[:2], 1, 0.1, [PLAIN, BF16]
    shape, report = vgg19(), Report(name="scaling")
    report.remarks += [
        "EMULATED: forward and backward wait instead of computing (each layer its share of "
        f"{compute_s:g} s), since all hosts share this machine's cores and would slow each "
        "other down; gradients, their order, the methods and the network stack are real",
        f"{shape.name} with 1/{shape.scale} of its parameters ({shape.bytes / 1e6:.2f} MB of "
        "gradients, buckets thinned alike); weak scaling: each host has the same batch",
    ]
    rows: dict[tuple[int, str], Row] = {}
    with fleet(max(sizes), serve, arguments.mbit_per_s) as hosts:
        for workers, method, outcome in contest(hosts, sizes, methods, repeats, compute_s):
            row = rows.setdefault((workers, method), Row(workers=workers, method=method))
            row.outcomes.append(outcome)
    order = [method.name for method in methods]
    rows = dict(sorted(rows.items(), key=lambda item: (item[0][0], order.index(item[0][1]))))
    alone_s = statistics.median(outcome.step_s for outcome in rows[1, PLAIN.name].outcomes)
    report.figures += judge(rows, alone_s, gates=not arguments.quick)
    report.raw = {f"{n} hosts, {m}": [asdict(o) for o in r.outcomes] for (n, m), r in rows.items()}
    status = report.finish(arguments)
    print("\n" + markdown(_HEADER, [row.cells(alone_s) for row in rows.values()]))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
