"""What `paceline predict` would say from one worker and one link, against what many hosts then do.

    python -m benchmarks.prediction [--quick] [--repeats N] [--only WORDS] [--check] [--json FILE]

For each network the profile of a training on one host, and for each rate the link between two hosts
(a stream, as `paceline doctor` measures it, and a small all-reduce of as many hosts, since Gloo's
own work counts where many share two cores), go into the model of `gradient_sync/cost_model.py`;
then each setting is trained. The hosts are network namespaces (needs root and iproute2), and their
computation is EMULATED by waits: see `benchmarks/emulated.py`.
"""

import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import final

from benchmarks.emulated import NETWORKS
from benchmarks.figures import Figure, Report, markdown, parser
from benchmarks.fleet import Fleet, fleet
from benchmarks.ordered_hosts import why_not
from benchmarks.scaling import BF16, PLAIN, Method
from benchmarks.trials import Outcome, Trial, Wire, measure_link, ring_step_s, run, serve
from paceline.gradient_sync.cost_model import Compute, Machine, StepCost, step_cost
from paceline.gradient_sync.network_model import Cluster, Network
from paceline.gradient_sync.options import SyncOptions

COMPUTE_S: Mapping[str, float] = {"vgg19": 0.8, "resnet50": 0.6}
"""About what a step of the EC2 study took, 0.81 s, and less for what has fewer multiplications."""
MOST_MEDIAN, MOST_WORST = 0.05, 0.15

_ALONE = Method(name="all-reduce", settings={"sync": "allreduce"}, steps=16)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is predicted and measured."""

    network: str
    workers: int
    rate: int
    """Mbit/s."""
    method: Method

    @property
    def title(self) -> str:
        """Name it."""
        name = NETWORKS[self.network]().name
        return f"{name}, {self.workers} hosts, {self.rate} Mbit/s, {self.method.name}"


def _settings(
    network: str, method: Method, places: Sequence[tuple[int, int]]
) -> tuple[Setting, ...]:
    return tuple(
        Setting(network=network, workers=workers, rate=rate, method=method)
        for workers, rate in places
    )


SETTINGS = (
    *_settings("vgg19", PLAIN, [(2, 50), (2, 400), (4, 200), (8, 200), (8, 1000)]),
    *_settings("vgg19", BF16, [(4, 50), (8, 200)]),
    *_settings("resnet50", PLAIN, [(2, 100), (4, 100), (8, 50), (8, 400), (8, 1000)]),
    *_settings("resnet50", BF16, [(8, 100)]),
)
_QUICK = _settings("vgg19", PLAIN, [(2, 400)])


@final
@dataclass(kw_only=True)
class Case:
    """A setting with what was said of it and what it did."""

    setting: Setting
    predicted: StepCost
    alone_s: float
    wire: Wire
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        """Median of the repeats."""
        return statistics.median(outcome.step_s for outcome in self.outcomes)

    @property
    def error(self) -> float:
        """By which share more was predicted than measured."""
        return self.predicted.step_s / self.measured_s - 1

    def cells(self) -> tuple[str, ...]:
        """Give the cells of its row in the table."""
        shown = [1000 * outcome.step_s for outcome in self.outcomes]
        return (
            self.setting.title,
            f"{1000 * self.predicted.step_s:.0f}",
            f"{1000 * self.measured_s:.0f} ({min(shown):.0f}-{max(shown):.0f})",
            f"{self.error:+.1%}",
            f"{self.alone_s / self.predicted.step_s:.2f}",
            f"{self.alone_s / self.measured_s:.2f}",
        )


_HEADER = (
    "setting",
    "predicted, ms",
    "measured, ms",
    "error",
    "efficiency predicted",
    "measured",
)


def predict(setting: Setting, compute: Compute, wire: Wire) -> StepCost:
    """Say what a setting will do, from one worker and one link."""
    network = Network(
        bandwidth_bytes_per_s=wire.bandwidth_bytes_per_s, round_trip_s=wire.round_trip_s
    )
    cluster = Cluster(nodes=setting.workers, network=network)
    method = SyncOptions(**setting.method.settings)  # type: ignore[arg-type]  # all are its own
    thinned = replace(compute, bucket_bytes=NETWORKS[setting.network]().bucket_bytes)
    return step_cost(thinned, method, cluster, Machine.usual("cpu"))


def measure(settings: Sequence[Setting], repeats: int, *, first: bool = False) -> list[Case]:
    """Predict and train; rates in ascending order, settings in turn."""
    most = max(setting.workers for setting in settings)
    rates = sorted({setting.rate for setting in settings})
    with fleet(most, serve, rates[0]) as hosts:
        alone = {n: _alone(n, hosts) for n in dict.fromkeys(s.network for s in settings)}
        cases = []
        for rate in rates:
            hosts.set_rate(rate)
            wires = _wires([s.workers for s in settings if s.rate == rate], hosts)
            here = [
                Case(
                    setting=setting,
                    predicted=predict(setting, Compute.of(own.profile), wire),
                    alone_s=own.step_s,
                    wire=wire,
                )
                for setting in settings
                if setting.rate == rate
                for own, wire in ((alone[setting.network], wires[setting.workers]),)
            ]
            for number in range(repeats):
                for case in here if number % 2 else reversed(here):
                    case.outcomes.append(_measured(case.setting, hosts, number))
            cases += here
    return cases


def _wires(numbers: Sequence[int], hosts: Fleet) -> dict[int, Wire]:
    """Measure the way between two hosts, and a small message's in a ring of so many of them."""
    wire = measure_link(hosts)
    each = sorted(set(numbers))
    return {n: replace(wire, round_trip_s=ring_step_s(hosts, n)) for n in each}


def _alone(network: str, hosts: Fleet) -> Outcome:
    setting = Setting(network=network, workers=1, rate=0, method=_ALONE)
    return _measured(setting, hosts, 0)


def _measured(setting: Setting, hosts: Fleet, number: int) -> Outcome:
    trial = Trial(
        network=setting.network,
        compute_s=COMPUTE_S[setting.network],
        workers=setting.workers,
        settings=setting.method.settings,
        lead=setting.method.lead,
        steps=setting.method.steps,
    )
    return run(trial, hosts, f"round {number + 1}, {setting.title}")


def judge(cases: Sequence[Case]) -> list[Figure]:
    """Compare the errors with what is promised."""
    errors = [abs(case.error) for case in cases]
    worst = max(cases, key=lambda case: abs(case.error))
    count = len(errors)
    return [
        Figure(
            what="median error of a step's time",
            value=100 * statistics.median(errors),
            unit="%",
            at_most=100 * MOST_MEDIAN,
            count=count,
        ),
        Figure(
            what="worst error",
            value=100 * max(errors),
            unit="%",
            at_most=100 * MOST_WORST,
            count=count,
            note=worst.setting.title,
        ),
    ]


def remarks(cases: Sequence[Case]) -> list[str]:
    """Say how it was measured."""
    links = {(case.setting.rate, case.setting.workers): case.wire for case in cases}
    shown = (
        f"{rate} Mbit/s, {workers} hosts: {8e-6 * wire.bandwidth_bytes_per_s:.0f} Mbit/s, "
        f"{1e6 * wire.round_trip_s:.0f} us"
        for (rate, workers), wire in sorted(links.items())
    )
    return [
        "EMULATED: forward and backward wait instead of computing, since all hosts share this "
        "machine's cores; gradients, their order, the methods and the network stack are real",
        "predicted from the profile of one host, a stream between two hosts and a step of a small "
        "all-reduce: " + "; ".join(shown),
    ]


def main() -> int:
    """Predict, measure, compare."""
    about = parser(__doc__ or "")
    about.add_argument("--repeats", type=int, default=2)
    about.add_argument("--only", default="", help="settings whose title has these words")
    arguments = about.parse_args()
    missing = why_not()
    if missing:
        print(f"nothing was measured: {missing}")
        return 1 if arguments.check else 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that namespaces are removed
    repeats = 1 if arguments.quick else arguments.repeats
    settings = _QUICK if arguments.quick else SETTINGS
    cases = measure([one for one in settings if arguments.only in one.title], repeats)
    cases.sort(key=lambda case: case.setting.title)
    report = Report(name="prediction", remarks=remarks(cases), figures=judge(cases))
    report.raw = {case.setting.title: asdict(case) for case in cases}
    status = report.finish(arguments)
    print("\n" + markdown(_HEADER, [case.cells() for case in cases]))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
