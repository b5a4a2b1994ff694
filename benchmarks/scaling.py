"""Every way of combining gradients on 1, 2, 4 and 8 hosts whose links hold them up.

    python -m benchmarks.scaling [--quick] [--repeats N] [--compute-s S] [--check] [--json FILE]

The hosts are network namespaces (needs root and iproute2) with links of one rate, at which plain
all-reduce reaches an efficiency of 0.46 on 8 of them: found by the cost model, then measured. Their
computation is EMULATED by waits, since all of them share this machine's cores; gradients of a
VGG-19 thinned to a sixty-fourth, their order and their way over the network are real.
"""

import argparse
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import final

from benchmarks.emulated import FORWARD, Shape, arrivals, vgg19
from benchmarks.figures import Figure, Report, markdown, median_figure, parser
from benchmarks.fleet import FIRST_HELP, Fleet, fleet
from benchmarks.ordered_hosts import why_not
from benchmarks.trials import Outcome, Settings, Trial, achieved_bytes_per_s, run, serve
from paceline.gradient_sync.cost_model import Compute, step_cost
from paceline.gradient_sync.network_model import Cluster, Network
from paceline.gradient_sync.options import SyncOptions
from paceline.results.profile import Arrival

NETWORK = "vgg19"
SIZES = (1, 2, 4, 8)
TARGET, WITHIN, WANTED = 0.46, 0.03, 0.90
COMPUTE_S = 0.8
"""About what a step of the EC2 study took: 0.81 s."""
EVERY = 8
GOODPUT = 0.957
"""Share of a link's rate that is left to its users: the rest is headers."""
_CLOSE = 0.01
"""A calibration this close to its target is left as it is."""
_TRIES = 4
_CHECK_BYTES = 16_000_000
_ROUND_TRIP_S = 30e-6
_SLOWEST, _FASTEST = 1.0, 10_000.0  # Mbit/s
_FIRST_RATE = 1000.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of combining gradients, and which of its steps are measured."""

    name: str
    settings: Settings
    lead: int = 2
    """Steps before: until it does what it does for good."""
    steps: int = 6
    epochs: int = 1
    """What is measured is in the last one."""


def local(name: str, delay: int, **settings: str) -> Method:
    """Steps on one's own: one whole round is measured, from between two exchanges on."""
    rounds: Settings = {"sync_every": EVERY, "sync_delay": delay, "sync_warmup_steps": 1}
    lead = 1 + delay + (EVERY - delay) // 2
    return Method(name=name, settings={**rounds, **settings}, lead=lead, steps=EVERY)


def power(rank: int) -> Method:
    """PowerSGD after its warm-up."""
    settings: Settings = {"sync": "powersgd", "powersgd_rank": rank, "sync_warmup_steps": 2}
    return Method(name=f"PowerSGD, rank {rank}", settings=settings, lead=4)


METHODS = (
    Method(name="all-reduce", settings={"sync": "allreduce"}),
    Method(name="bf16", settings={"sync": "bf16"}),
    Method(name="fp16", settings={"sync": "fp16"}),
    power(4),
    power(1),
    local(f"local, H={EVERY}", EVERY // 2, sync="local"),
    local(f"local, H={EVERY}, waiting", 0, sync="local"),
    local(f"DiLoCo, H={EVERY}", EVERY // 2, sync="diloco"),
    local(f"DiLoCo, H={EVERY}, int8", EVERY // 2, sync="diloco", sync_precision="int8"),
    Method(name="auto", settings={"sync": "auto"}, lead=9, steps=16, epochs=2),
)
PLAIN, AUTO = METHODS[0], METHODS[-1]
"""Auto measures in the first epoch, so that its training takes long: on the most hosts alone."""
_QUICK = ("all-reduce", "bf16", f"local, H={EVERY}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, and for how long."""

    sizes: Sequence[int]
    methods: Sequence[Method]
    repeats: int
    compute_s: float
    tries: int = _TRIES
    """Of the calibration."""
    first: bool = False
    """Whether the hosts' processes come before all others."""
    gates: bool = True
    """Whether there is enough of it to judge."""


@final
@dataclass(kw_only=True)
class Row:
    """A method on so many hosts."""

    workers: int
    method: str
    outcomes: list[Outcome] = field(default_factory=list)

    def steps(self) -> list[float]:
        """Seconds, one for each repeat."""
        return [outcome.step_s for outcome in self.outcomes]

    def efficiencies(self, alone_s: float) -> list[float]:
        """Compare with one host that has nobody to talk to, one for each repeat."""
        return [alone_s / step_s for step_s in self.steps()]

    def cells(self, alone_s: float) -> tuple[str, ...]:
        """Give the cells of its row in the table."""
        sent = statistics.median(o.sent_bytes for o in self.outcomes)
        cores = statistics.median(o.cores for o in self.outcomes)
        return (
            str(self.workers),
            self.method,
            _spread([1000 * step_s for step_s in self.steps()], "{:.0f}"),
            _spread(self.efficiencies(alone_s), "{:.3f}"),
            f"{sent / 1e6:.2f}",
            _spread([held_up(o) for o in self.outcomes if o.profile is not None], "{:.0%}"),
            f"{cores:.2f}",
            str(len(self.outcomes)),
        )


_HEADER = ("hosts", "method", "step, ms", "efficiency", "MB sent", "held up", "cores", "n")
_LEGEND = (
    "medians, least and most of the repeats; MB sent: by one host in a step, as its interface "
    "counts; held up: what Paceline's own profile says of the share of communication that isn't "
    "hidden; cores: how many were busy over all hosts, of those that this machine has"
)


def held_up(outcome: Outcome) -> float:
    """Give the share of a step that waits for communication, by the training's own profile."""
    assert outcome.profile is not None
    parts = outcome.profile.parts
    total = sum(getattr(parts, part.name) for part in fields(parts))
    return float((parts.exposed + parts.waiting) / total)


def own_compute(shape: Shape, compute_s: float, alone_s: float) -> Compute:
    """Describe a worker by what it is told to wait for.

    Args:
        shape: The network.
        compute_s: Seconds of forward and backward.
        alone_s: Of a whole step, measured on one host.
    """
    ready = (Arrival(at_s=at_s, bytes=size) for at_s, size in arrivals(shape, compute_s))
    return Compute(
        before_s=FORWARD * compute_s,
        backward_s=(1 - FORWARD) * compute_s,
        after_s=max(0.0, alone_s - compute_s),
        gradients=tuple(ready),
        parameter_bytes=shape.bytes,
        bucket_bytes=shape.bucket_bytes,
    )


def rate_for(step_s: float, compute: Compute, workers: int) -> float:
    """Find the rate in Mbit/s at which all-reduce takes so long by the model. Pure."""
    slow, fast = _SLOWEST, _FASTEST
    for _ in range(60):
        rate = (slow * fast) ** 0.5
        if modelled_s(rate, compute, workers) > step_s:
            slow = rate
        else:
            fast = rate
    return fast


def modelled_s(megabits_per_s: float, compute: Compute, workers: int) -> float:
    """Say what the cost model makes of an all-reduce step at a rate. Pure."""
    network = Network(
        bandwidth_bytes_per_s=GOODPUT * megabits_per_s * 1e6 / 8, round_trip_s=_ROUND_TRIP_S
    )
    cluster = Cluster(nodes=workers, network=network)
    return step_cost(compute, SyncOptions(sync="allreduce"), cluster).step_s


def calibrate(hosts: Fleet, plan: Plan) -> tuple[float, list[str]]:
    """Give the links the rate at which all-reduce reaches the target on all hosts.

    Returns:
        The rate in Mbit/s, and what was tried.
    """
    workers, tried = max(plan.sizes), {}
    alone_s = _usual_s(run(_trial(PLAIN, 1, plan), hosts, "one host"))
    compute = own_compute(vgg19(), plan.compute_s, alone_s)
    wanted_s, beside_s = alone_s / TARGET, 0.0
    for number in range(plan.tries):
        rate = rate_for(wanted_s - beside_s, compute, workers)
        hosts.set_rate(rate)
        found_s = _usual_s(run(_trial(PLAIN, workers, plan), hosts, f"calibration {number + 1}"))
        tried[rate] = alone_s / found_s
        if abs(tried[rate] - TARGET) <= _CLOSE:
            break
        beside_s = found_s - modelled_s(rate, compute, workers)
    best = min(tried, key=lambda rate: abs(tried[rate] - TARGET))
    hosts.set_rate(best)
    return best, [f"{rate:.0f} Mbit/s: {reached:.3f}" for rate, reached in tried.items()]


def _usual_s(outcome: Outcome) -> float:
    """Give the median step: one that something else held up doesn't count."""
    return statistics.median(outcome.each_s)


def contest(hosts: Fleet, plan: Plan) -> Iterator[tuple[int, str, Outcome]]:
    """Measure everything in turn, in another order in each round."""
    pairs = [
        (n, m)
        for n in plan.sizes
        for m in plan.methods
        if m is PLAIN or (n > 1 and (m is not AUTO or n == max(plan.sizes)))
    ]
    for number in range(plan.repeats):
        for workers, method in pairs if number % 2 else reversed(pairs):
            name = f"round {number + 1}, {workers} hosts, {method.name}"
            yield workers, method.name, run(_trial(method, workers, plan), hosts, name)


def _trial(method: Method, workers: int, plan: Plan) -> Trial:
    return Trial(
        network=NETWORK,
        compute_s=plan.compute_s,
        workers=workers,
        settings=method.settings,
        lead=method.lead,
        steps=method.steps,
        epochs=method.epochs,
    )


def measure(plan: Plan, report: Report) -> dict[tuple[int, str], Row]:
    """Measure on hosts that are made for it, and note how."""
    with fleet(max(plan.sizes), serve, _FIRST_RATE, first=plan.first) as hosts:
        rate, tried = calibrate(hosts, plan)
        report.remarks.append(f"calibration of all-reduce to {TARGET}: {'; '.join(tried)}")
        achieved = achieved_bytes_per_s(hosts, max(plan.sizes), _CHECK_BYTES) * 8e-6
        report.figures.append(
            Figure(
                what=f"shaper: a plain all-reduce of {_CHECK_BYTES / 1e6:.0f} MB",
                value=achieved / (GOODPUT * rate),
                unit="x",
                at_least=0.95,
                note=f"{achieved:.0f} of {GOODPUT * rate:.0f} Mbit/s without headers",
            )
        )
        rows: dict[tuple[int, str], Row] = {}
        for workers, method, outcome in contest(hosts, plan):
            row = rows.setdefault((workers, method), Row(workers=workers, method=method))
            row.outcomes.append(outcome)
    order = [method.name for method in plan.methods]
    return dict(sorted(rows.items(), key=lambda item: (item[0][0], order.index(item[0][1]))))


def judge(rows: Mapping[tuple[int, str], Row], plan: Plan, alone_s: float) -> list[Figure]:
    """Compare with what is wanted on the most hosts."""
    workers = max(plan.sizes)
    reached = {m: row.efficiencies(alone_s) for (n, m), row in rows.items() if n == workers}
    plain = reached[PLAIN.name]
    best = max(reached, key=lambda method: statistics.median(reached[method]))
    off, gates = abs(statistics.median(plain) - TARGET), plan.gates
    return [
        median_figure(f"efficiency of all-reduce on {workers} hosts", plain, ""),
        Figure(what=f"- away from {TARGET}", value=off, unit="", at_most=WITHIN if gates else None),
        median_figure(
            f"efficiency of the best on {workers} hosts",
            reached[best],
            "",
            at_least=WANTED if gates else None,
            note=best,
        ),
    ]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    middle, low, high = map(form.format, (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}-{high})"


def planned(arguments: argparse.Namespace) -> Plan:
    """Put a plan together from the command line."""
    if arguments.quick:
        few = [method for method in METHODS if method.name in _QUICK]
        return Plan(sizes=(1, 2), methods=few, repeats=1, compute_s=0.1, tries=1, gates=False)
    chosen = [m for m in METHODS if m is PLAIN or arguments.only in m.name]
    return Plan(
        sizes=SIZES,
        methods=chosen,
        repeats=arguments.repeats,
        compute_s=arguments.compute_s,
        first=arguments.first,
    )


def main() -> int:
    """Measure and report."""
    about = parser(__doc__ or "")
    about.add_argument("--repeats", type=int, default=3)
    about.add_argument("--compute-s", type=float, default=COMPUTE_S, help="of a step, waited for")
    about.add_argument("--only", default="", help="methods whose name has these words")
    about.add_argument("--first", action="store_true", help=FIRST_HELP)
    arguments = about.parse_args()
    missing = why_not()
    if missing:
        print(f"nothing was measured: {missing}")
        return 1 if arguments.check else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces are removed
    plan, shape = planned(arguments), vgg19()
    report = Report(name="scaling")
    report.remarks.append(
        "EMULATED: forward and backward wait instead of computing (each layer its share of "
        f"{plan.compute_s:g} s), since all hosts share this machine's cores and would slow each "
        "other down; gradients, their order, the methods and the network stack are real"
    )
    report.remarks.append(
        f"{shape.name} with 1/{shape.scale} of its parameters ({shape.bytes / 1e6:.2f} MB of "
        "gradients, buckets thinned alike); weak scaling: each host has the same batch"
    )
    rows = measure(plan, report)
    alone_s = statistics.median(rows[1, PLAIN.name].steps())
    report.figures += judge(rows, plan, alone_s)
    said = dict.fromkeys(o.said for row in rows.values() for o in row.outcomes if o.said)
    report.remarks += said
    report.raw = {f"{n} hosts, {m}": [asdict(o) for o in r.outcomes] for (n, m), r in rows.items()}
    status = report.finish(arguments)
    print("\n" + markdown(_HEADER, [row.cells(alone_s) for row in rows.values()]))
    print(f"\n{_LEGEND}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
