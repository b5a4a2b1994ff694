"""What a prediction is made from: a profile, sizes that were measured, and the network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from paceline.errors import DataError, PacelineError, UsageError
from paceline.files import read_json_object, why_unreadable
from paceline.gradient_sync.cost_model import Compute
from paceline.gradient_sync.network_model import Cluster, Library, Network
from paceline.gradient_sync.options import SyncOptions
from paceline.options.fields import read_dataclass
from paceline.options.figures import show_bandwidth, show_short_percent, show_time
from paceline.options.quantities import parse_bandwidth_bytes_per_s, parse_count, parse_short_time_s
from paceline.results.profile import StepProfile
from paceline.results.study import STUDY_JSON, Mode, SizeResult, Study, require_study
from paceline.scaling.fitting import SizeTime, fit_link
from paceline.scaling.options import PLAIN

PAYLOAD = 0.957
"""What is left of a link's speed for payload: TCP in Ethernet packets of 1,500 bytes, 95.7 % where
it was measured."""
GLOO_BYTES_PER_S = 1.25e9
"""Gloo copies and adds on processors, which sets an end to what it makes of a fast link."""
_USUAL_ROUND_TRIP_S = 1e-4
_STATED_UNCERTAINTY, _MEASURED_UNCERTAINTY = 0.1, 0.03
_STREAMS = ("bandwidth", "several")
_PROFILE = "profile.json"


@dataclass(frozen=True, kw_only=True)
class PredictionInputs:
    """What was measured."""

    profile: StepProfile
    source: str
    """Where from, for people."""
    sizes: tuple[SizeTime, ...] = ()
    """All-reduce in full on several nodes, with as many workers on each."""
    methods: tuple[SyncOptions, ...] = ()
    """Those that a study measured, with their options."""
    mode: Mode = "weak"
    """As a study scaled."""
    efficiencies: Mapping[tuple[SyncOptions, int, int], float] = field(default_factory=dict)
    """That a study measured, by method, nodes and workers on each."""
    not_reliable: str = ""
    """Why no conclusion can be drawn from a study, in words; empty where one can be."""
    warnings: tuple[str, ...] = ()
    """What a reader of a study's figures should know."""


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """The network that a prediction is for."""

    network: Network
    source: str
    """How it is known, for people."""
    uncertainty: float
    """Relative standard deviation of its bandwidth."""


def read_inputs(path: Path) -> PredictionInputs:
    """Read a run directory, a study's directory, or a profile.

    Raises:
        UsageError: It is none of them.
        DataError: A file is damaged.
    """
    if path.is_file():
        return PredictionInputs(profile=StepProfile.read(path), source=str(path))
    if (path / STUDY_JSON).is_file():
        return _of_study(path)
    if (path / _PROFILE).is_file():
        return PredictionInputs(profile=StepProfile.read(path / _PROFILE), source=str(path))
    raise UsageError(
        f"{path} holds no {_PROFILE} and no {STUDY_JSON}. Name a run directory (a training writes "
        "its profile at the end of each epoch), or the directory of `paceline scale`"
    )


def _of_study(path: Path) -> PredictionInputs:
    """Take a study's profile of one worker, and its other sizes to fit the predictions to."""
    try:
        study = require_study(path, sizes=True)
        several = [size for size in study.sizes if size.workers > 1]
        methods = [(size, _method(size)) for size in several]
    except (OSError, ValueError) as error:
        if isinstance(error, PacelineError):
            raise
        raise DataError(f"{path / STUDY_JSON} isn't a study of Paceline: {_why(error)}") from error
    profile = _alone(path, study)
    slots = _slots(study)
    return PredictionInputs(
        profile=profile,
        source=str(path),
        sizes=tuple(_measured(several, profile.global_batch, slots)),
        methods=tuple(dict.fromkeys(method for _, method in methods)),
        mode=study.mode,
        efficiencies={
            (method, nodes, size.workers // nodes): size.efficiency.median
            for size, method in methods
            if (nodes := _even_nodes(size, slots)) and size.efficiency
        },
        not_reliable=study.not_reliable,
        warnings=study.notes,
    )


def _why(error: Exception) -> str:
    """Say what is wrong with a file by the error that reading it ended with."""
    if isinstance(error, OSError | ValueError):
        return why_unreadable(error)
    if isinstance(error, KeyError):
        return f"it names no {error}"
    return f"a part isn't what it should be ({error})"


def _alone(path: Path, study: Study) -> StepProfile:
    """Give the profile of the run of one worker whose steps are in the middle."""
    alone = [size for size in study.sizes if size.workers == 1 and size.method == PLAIN]
    repeats = [repeat for size in alone for repeat in size.repeats if not repeat.problem]
    profiles = [StepProfile.read(path / repeat.run_dir / _PROFILE) for repeat in repeats]
    if not profiles:
        raise DataError(f"{path} holds no measurement of one worker: run `paceline scale` again")
    return sorted(profiles, key=lambda one: one.step_s.median)[len(profiles) // 2]


def _measured(sizes: Sequence[SizeResult], batch: int, slots: Sequence[int]) -> Iterator[SizeTime]:
    for size in sizes:
        nodes = _even_nodes(size, slots)
        is_plain = _method(size) == SyncOptions(sync=PLAIN)
        if is_plain and nodes and size.step_s and size.global_batch:
            yield SizeTime(
                nodes=nodes,
                per_node=size.workers // nodes,
                step_s=size.step_s.median,
                share=size.global_batch / size.workers / batch,
            )


def _slots(study: Study) -> tuple[int, ...]:
    """Read how many workers each host takes, the first one first; none where it isn't known."""
    hosts = study.asked.get("hosts")
    slots = [str(host).rpartition(":")[2] for host in (hosts if isinstance(hosts, list) else ())]
    return tuple(number for number in map(parse_count, slots) if number is not None)


def _even_nodes(size: SizeResult, slots: Sequence[int]) -> int | None:
    """Count the nodes of a size of several with as many workers on each: the first slots."""
    if size.nodes is None or size.nodes == 1 or size.workers % size.nodes:
        return None
    each = size.workers // size.nodes
    return size.nodes if all(number == each for number in slots[: size.nodes - 1]) else None


def _method(size: SizeResult) -> SyncOptions:
    """Read a method as it was measured; options that aren't of SyncOptions count nothing here."""
    known = {field.name for field in fields(SyncOptions)}
    options = {n: v for n, v in size.method_options.items() if n in known and v is not None}
    settings = options | {"sync": size.method, "sync_warmup_steps": None}
    return read_dataclass(SyncOptions, settings, strict=True)


def stated_link(link: str, round_trip: str | None, library: Library) -> NetworkLink:
    """Take the network as the user states it.

    Args:
        link: Its nominal speed, such as `25gbit`.
        round_trip: Such as `50us`. Default: 0.1 ms.

    Raises:
        UsageError: One of them can't be read.
    """
    nominal = parse_bandwidth_bytes_per_s(link)
    round_trip_s = _round_trip_s(round_trip)
    share = show_short_percent(PAYLOAD)
    text = f"{show_bandwidth(nominal)}, as stated, of which {share} is payload"
    usable = nominal * PAYLOAD
    if library == "gloo" and usable > GLOO_BYTES_PER_S:
        usable = GLOO_BYTES_PER_S
        text = f"{show_bandwidth(nominal)}, as stated, of which Gloo is taken to use 10 Gbit/s"
    return _link(usable, round_trip_s, text, _STATED_UNCERTAINTY)


def examined_link(path: Path, round_trip: str | None, library: Library) -> NetworkLink:
    """Take the network that `paceline doctor --json` has measured.

    Its all-reduce counts where it went well and by the same library; otherwise the slowest way
    between two hosts, of one stream for Gloo and of several for NCCL.

    Raises:
        UsageError: The file can't be read, or holds no link.
    """
    try:
        content: Any = read_json_object(path)
        links = [link for link in content["links"] if isinstance(link, dict)]
        bus = _bus_bytes_per_s(content["all_reduce"] or {}, library)
        times = [float(link["round_trip_s"]) for link in links if link["round_trip_s"] is not None]
        speeds = list(_speeds(links, library))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} isn't what `paceline doctor --hosts ... --json` prints: {_why(error)}"
        ) from error
    if not bus and not speeds:
        raise UsageError(f"{path} holds no measured link: examine two hosts or more")
    # An all-reduce is what a step waits for; single streams are second best.
    way = "its all-reduce" if bus else "the slowest way between its hosts"
    round_trip_s = _round_trip_s(round_trip) if round_trip or not times else median(times)
    text = f"{show_bandwidth(bus or min(speeds))}, {way} as doctor measured it"
    return _link(bus or min(speeds), round_trip_s, text, _MEASURED_UNCERTAINTY)


def _bus_bytes_per_s(reduced: Mapping[str, Any], library: Library) -> float | None:
    """Give what an all-reduce made of the link; None where it failed, or another library did it."""
    if not reduced.get("is_right") or reduced["backend"] != library:
        return None
    return float(reduced["bus_bytes_per_s"])


def _speeds(links: Sequence[Mapping[str, float | None]], library: Library) -> Iterator[float]:
    for link in links:
        one, several = (float(link[f"{name}_bytes_per_s"] or 0.0) for name in _STREAMS)
        yield from (speed for speed in [one if library == "gloo" else max(one, several)] if speed)


def fitted_link(inputs: PredictionInputs, round_trip: str | None, library: Library) -> NetworkLink:
    """Take the bandwidth that explains what a study has measured on several nodes.

    Raises:
        UsageError: Nothing was measured on several nodes, no network explains it, or the
            round-trip can't be read.
    """
    if not inputs.sizes:
        raise UsageError(
            f"{inputs.source} was measured on one host, so that no network is known. Say "
            "--link 25gbit --rtt 50us, or --doctor FILE with what `paceline doctor --json` printed"
        )
    round_trip_s = _round_trip_s(round_trip)
    # The bandwidth is what is fitted: 1.0 only stands in its place.
    unknown = Network(bandwidth_bytes_per_s=1.0, round_trip_s=round_trip_s)
    cluster = Cluster(nodes=1, network=unknown, library=library)
    fitted = fit_link(Compute.of(inputs.profile), inputs.sizes, cluster)
    if not fitted.is_plausible:
        raise UsageError(
            f"the steps that {inputs.source} measured on several nodes say nothing about the "
            "network: they are as fast as if it took no time, or differ by something else. Say to "
            "`paceline predict` --link 25gbit --rtt 50us, or --doctor FILE"
        )
    speed = fitted.network.bandwidth_bytes_per_s
    text = (
        f"{show_bandwidth(speed)}, which explains the study's own sizes "
        f"to {show_short_percent(round(fitted.relative_error, 3))} of their steps"
    )
    return _link(speed, round_trip_s, text, max(_MEASURED_UNCERTAINTY, fitted.relative_error))


def _link(speed: float, round_trip_s: float, text: str, uncertainty: float) -> NetworkLink:
    return NetworkLink(
        network=Network(bandwidth_bytes_per_s=speed, round_trip_s=round_trip_s),
        source=f"{text}; round-trip {show_time(round_trip_s)}",
        uncertainty=uncertainty,
    )


def _round_trip_s(text: str | None) -> float:
    return _USUAL_ROUND_TRIP_S if text is None else parse_short_time_s(text)
