"""What a study measures, and in which order. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import UsageError
from paceline.gradient_sync.options import OWN_OPTIONS, SyncMethod
from paceline.launch.ssh.hostfile import Host
from paceline.options.fields import OptionValue
from paceline.results.study import Mode
from paceline.scaling.options import PLAIN

SLOWER_ALONE = ("ordered",)
"""Methods that cost something even where there is one worker, so that it is measured."""
ENDED_FROM_OUTSIDE = ("ordered",)
"""Methods that refuse a time budget, since their bits must not follow the clock."""
_OPTIONS_OF: Mapping[str, tuple[str, ...]] = {"ordered": ("shards",), **OWN_OPTIONS}
METHOD_OPTIONS = tuple(dict.fromkeys(name for names in _OPTIONS_OF.values() for name in names))
"""Options of training that only some methods have."""
_MIN_WARMUP_STEPS = 2
"""PowerSGD's error feedback begins after two steps at the earliest."""


def own_options(method: str) -> tuple[str, ...]:
    """Name the options of training that only this method, and maybe some others, have."""
    return _OPTIONS_OF.get(method, ())


@dataclass(frozen=True, kw_only=True)
class Size:
    """One number of workers with one method."""

    workers: int
    nodes: int
    method: SyncMethod

    @property
    def name(self) -> str:
        """Fit for a directory's name."""
        return f"{self.workers}-{self.method}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One training of a size, in one round."""

    size: Size
    round: int
    """From 1."""

    @property
    def name(self) -> str:
        """Fit for a directory's name."""
        return f"{self.size.name}-{self.round}"


def make_sizes(
    workers: Sequence[int], methods: Sequence[SyncMethod], hosts: Sequence[Host]
) -> tuple[Size, ...]:
    """List the sizes of a study, the smallest first. One plain worker is always the first.

    Args:
        hosts: Where they run, each with its slots; none: here.

    Raises:
        UsageError: The hosts have fewer slots.
    """
    alone = [PLAIN, *(method for method in methods if method in SLOWER_ALONE)]
    pairs = [(1, method) for method in alone]
    pairs += [(count, method) for count in sorted(workers) if count > 1 for method in methods]
    return tuple(
        Size(workers=count, nodes=len(first_slots(hosts, count)) or 1, method=method)
        for count, method in pairs
    )


def first_slots(hosts: Sequence[Host], workers: int) -> tuple[Host, ...]:
    """Take as many slots as there are workers from the first hosts on.

    Raises:
        UsageError: There are fewer, or a host doesn't say how many it has.
    """
    chosen: list[Host] = []
    left = workers
    for host in hosts:
        if host.slots is None:
            raise UsageError(
                f"{host.name}: say how many workers it takes, such as --hosts {host.name}:4, or "
                "slots=4 in the hostfile"
            )
        if left:
            chosen.append(replace(host, slots=min(left, host.slots)))
            left -= min(left, host.slots)
    if hosts and left:
        raise UsageError(f"--workers says {workers}, and the hosts take {workers - left}")
    return tuple(chosen)


def make_plan(sizes: Sequence[Size], repeats: int) -> tuple[Measurement, ...]:
    """Order the measurements: round by round, each in an order of its own.

    The first is one plain worker. Every other round goes backwards, and each begins elsewhere, so
    that what drifts (heat, a neighbour's load) isn't taken for an effect of the size.

    Args:
        sizes: The smallest first.
    """
    plan: list[Measurement] = []
    for turn in range(repeats):
        begin = turn * len(sizes) // repeats
        order = [*sizes[begin:], *sizes[:begin]]
        if turn % 2:
            order.reverse()
        plan += [Measurement(size=size, round=turn + 1) for size in order]
    return tuple(plan)


def method_settings(
    method: SyncMethod, given: Mapping[str, OptionValue], *, warm: bool
) -> dict[str, OptionValue]:
    """Give the options of training that make a method's step.

    Args:
        given: What the user says about methods in general.
        warm: Whether it is to begin at once rather than after the usual steps of averaging in
            full, which would fill a short measurement.
    """
    names = own_options(method)
    settings: dict[str, OptionValue] = {n: v for n, v in given.items() if n in names}
    if warm and method == "powersgd":
        settings["sync_warmup_steps"] = _MIN_WARMUP_STEPS
    return {"sync": method, **settings}


def idle_of_methods(methods: Sequence[SyncMethod], given: Iterable[str]) -> Mapping[str, str]:
    """List options of methods of which none is measured.

    Returns:
        By name, why it has no effect.
    """
    useful = {name for method in methods for name in own_options(method)}
    idle = {}
    for name in given:
        if name in METHOD_OPTIONS and name not in useful:
            owners = [method for method, names in _OPTIONS_OF.items() if name in names]
            idle[name] = (
                f"has no effect with --methods {','.join(methods)}: it is of {', '.join(owners)}"
            )
    return idle


def global_batch_of(mode: Mode, batch: int, workers: int) -> int:
    """Give the samples of a step over all workers.

    Args:
        batch: Of one worker, where it is measured alone.
        workers: How many share a step.
    """
    return batch * workers if mode == "weak" else batch
