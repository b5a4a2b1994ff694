"""What a worker of a fleet does: trainings of emulated networks, and measurements of its link."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, process_time
from typing import cast

import torch
import torch.distributed as dist

from benchmarks.emulated import NETWORKS, Emulated, scale_buckets, thinned_buckets, wake_exactly
from benchmarks.fleet import Answer, Fleet, Seat
from benchmarks.ordered_hosts import sent_bytes
from paceline.data.memory import TensorData
from paceline.distributed.environment import current_placement
from paceline.distributed.group import Group, joined
from paceline.doctor.facts import EPHEMERAL
from paceline.doctor.probes.client import Peer, measure
from paceline.doctor.probes.handshake import Tokens
from paceline.doctor.probes.server import ProbeServer
from paceline.options.fields import OptionValue
from paceline.results.profile import StepProfile
from paceline.results.run_directory import RunDirectory
from paceline.training.config import TrainConfig
from paceline.training.rng import seed_everything
from paceline.training.session import Session
from paceline.training.setup import open_session
from paceline.training.status_exchange import StopFlag
from paceline.training.worker import set_up_torch

Settings = Mapping[str, OptionValue]

BATCH = 32
"""Images of a worker, which nobody looks at."""
_CPU = torch.device("cpu")
_TIMEOUT_S = 120.0
_STREAM_S = 1.5
_SMALL = 50
"""Small all-reduces, of which the median counts."""
_USUAL: Settings = {
    "progress": "off",
    "device": "cpu",
    "loader_workers": 0,
    "hang_after_s": 0.0,
    "threads": 1,
    "timeout_s": _TIMEOUT_S,
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training that is measured."""

    network: str
    compute_s: float
    """Seconds that a step waits instead of computing."""
    workers: int
    settings: Settings = field(default_factory=dict)
    """Options of the training."""
    lead: int = 3
    """Steps before those that count."""
    steps: int = 8
    epochs: int = 1
    """Of as many steps each; those that count are in the last one."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured in the steps that count: means over the workers."""

    step_s: float
    each_s: tuple[float, ...]
    """The single steps of the first worker."""
    sent_bytes: float
    """By one worker in a step, headers included, as its interface counts them."""
    cores: float
    """Processor time of all workers together by the clock: how many cores were busy."""
    profile: StepProfile | None
    """What the training itself says."""
    said: str = ""
    """What `--sync auto` chose, and why."""


def run(trial: Trial, workers: Fleet, name: str) -> Outcome:
    """Train once on the first workers of a fleet.

    Args:
        trial: What is trained.
        workers: At least as many as it wants.
        name: Of its run directory, a new one; shown on stderr with the result.
    """
    directory = RunDirectory.named(workers.scratch / name)
    directory.create()
    meeting, told = workers.meeting(), asdict(trial)
    request = {"do": "train", "meeting": meeting, "run_dir": str(directory.path), "trial": told}
    answers = workers.ask([request] * trial.workers)
    step_s = _mean(answers, "step_s")
    print(f"{name}: {1000 * step_s:.0f} ms a step", file=sys.stderr, flush=True)
    profile = directory.path / "profile.json"
    return Outcome(
        step_s=step_s,
        each_s=tuple(cast(list[float], answers[0]["each_s"])),
        sent_bytes=_mean(answers, "sent_bytes") if workers.places[0] else 0.0,
        cores=trial.workers * _mean(answers, "cpu_s") / step_s,
        profile=StepProfile.read(profile) if profile.exists() else None,
        said=str(answers[0]["said"]),
    )


def achieved_bytes_per_s(workers: Fleet, number: int, size_bytes: int) -> float:
    """Measure what one of `number` workers sends per second in one large all-reduce."""
    request = {
        "do": "all_reduce",
        "meeting": workers.meeting(),
        "workers": number,
        "bytes": size_bytes,
    }
    seconds = _mean(workers.ask([request] * number), "seconds")
    return 2 * (number - 1) / number * size_bytes / seconds


def ring_step_s(workers: Fleet, number: int) -> float:
    """Measure what a step of a ring over `number` workers takes for next to nothing: Gloo's work.

    A bare message and its answer are faster: threads have to be woken, and share the cores.
    """
    meeting = workers.meeting()
    request = {"do": "ring", "meeting": meeting, "workers": number}
    return _mean(workers.ask([request] * number), "seconds") / (2 * (number - 1))


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The way between two hosts."""

    bandwidth_bytes_per_s: float
    round_trip_s: float


def measure_link(workers: Fleet) -> Wire:
    """Measure the way from the second host to the first one, as `paceline doctor` does.

    Raises:
        RuntimeError: It can't be measured.
    """
    tokens = asdict(Tokens.made())
    peer, _ = workers.ask([{"do": "listen", "tokens": tokens}, {"do": "nothing"}])
    link = workers.ask([{"do": "nothing"}, {"do": "call", "tokens": tokens, "peer": peer}])[1]
    if link["problem"]:
        raise RuntimeError(f"the link can't be measured: {link['problem']}")
    return Wire(
        bandwidth_bytes_per_s=cast(float, link["bandwidth_bytes_per_s"]),
        round_trip_s=cast(float, link["round_trip_s"]),
    )


def serve(seat: Seat, request: Mapping[str, object]) -> Answer:
    """Answer a request, in the worker."""
    match request["do"]:
        case "train":
            trial = Trial(**cast(dict[str, object], request["trial"]))  # type: ignore[arg-type]  # what asdict gave
            return _train(seat, trial, str(request["meeting"]), Path(str(request["run_dir"])))
        case "all_reduce":
            number, size = cast(int, request["workers"]), cast(int, request["bytes"])
            return _all_reduce(seat, number, str(request["meeting"]), size)
        case "ring":
            return _small_all_reduce(seat, cast(int, request["workers"]), str(request["meeting"]))
        case "listen":
            return _listen(seat, Tokens(**cast(dict[str, str], request["tokens"])))
        case "call":
            tokens = Tokens(**cast(dict[str, str], request["tokens"]))
            return _call(tokens, cast(dict[str, object], request["peer"]))
    return {}


@contextmanager
def opened(
    seat: Seat, workers: int, meeting: str, run_dir: Path, settings: Settings
) -> Iterator[Session]:
    """Open a session as one of so many workers. Collective."""
    config = _config(seat, workers, meeting, settings)
    set_up_torch(config)
    with _group(seat, workers, meeting, settings) as group:
        seed_everything(config.loop.seed)
        run_here = RunDirectory.named(run_dir)
        with open_session(config, run_here, group, StopFlag(under_launcher=True)) as session:
            yield session


def _config(seat: Seat, workers: int, meeting: str, settings: Settings) -> TrainConfig:
    place: Settings = {"init_method": meeting, "rank": seat.number, "world_size": workers}
    return TrainConfig.from_settings({**_USUAL, "interface": seat.interface, **place, **settings})


@contextmanager
def _group(seat: Seat, workers: int, meeting: str, settings: Settings) -> Iterator[Group]:
    options = _config(seat, workers, meeting, settings).dist
    with joined(current_placement(options), _CPU, "gloo", _TIMEOUT_S, options) as group:
        yield group


def _train(seat: Seat, trial: Trial, meeting: str, run_dir: Path) -> Answer:
    shape = NETWORKS[trial.network]()
    scale_buckets(shape)
    wake_exactly()
    batch, steps = BATCH * trial.workers, trial.lead + trial.steps + 1
    data = _nothing_to_see(steps * batch)
    edges = (trial.lead, trial.lead + trial.steps)
    with thinned_buckets(shape), opened(seat, trial.workers, meeting, run_dir, trial.settings) as s:
        network = s.model(Emulated(shape, trial.compute_s, seat.number))
        s.optimizer(torch.optim.SGD(network.parameters(), lr=1e-3))
        batches = s.loader(data, global_batch=batch)
        for _ in s.epochs(trial.epochs):
            stamps, sent, cpu = [], [], []
            for step, content in enumerate(batches.batches()):
                images, _ = content.pair()
                stamps.append(perf_counter())
                if step in edges:
                    sent.append(sent_bytes(seat.interface))
                    cpu.append(process_time())
                s.step(network(images))
        s.engine.snapshots.flush()
        said = s.engine.sync.label or ""
    counted = stamps[trial.lead : trial.lead + trial.steps + 1]
    return {
        "step_s": (counted[-1] - counted[0]) / trial.steps,
        "each_s": [after - before for before, after in pairwise(counted)],
        "sent_bytes": (sent[1] - sent[0]) / trial.steps,
        "said": said,
        "cpu_s": (cpu[1] - cpu[0]) / trial.steps,
    }


def _nothing_to_see(samples: int) -> TensorData:
    return TensorData(
        name="nothing",
        images=torch.zeros(samples, 1, 1, 1, dtype=torch.uint8),
        labels=torch.zeros(samples, dtype=torch.int64),
        class_names=("nothing",),
        mean=(0.0,),
        std=(1.0,),
    )


def _all_reduce(seat: Seat, workers: int, meeting: str, size_bytes: int) -> Answer:
    with _group(seat, workers, meeting, {}) as group:
        values = torch.ones(size_bytes // 4)
        dist.all_reduce(values[: len(values) // 8])
        group.barrier()
        began_s = perf_counter()
        dist.all_reduce(values)
        seconds = perf_counter() - began_s
        group.barrier()
    return {"seconds": seconds}


def _small_all_reduce(seat: Seat, workers: int, meeting: str) -> Answer:
    with _group(seat, workers, meeting, {}) as group:
        values = torch.ones(workers)
        dist.all_reduce(values)
        group.barrier()
        stamps = [perf_counter()]
        for _ in range(_SMALL):
            dist.all_reduce(values.fill_(1.0))
            stamps.append(perf_counter())
        group.barrier()
    return {"seconds": median(after - before for before, after in pairwise(stamps))}


def _listen(seat: Seat, tokens: Tokens) -> Answer:
    listener = ProbeServer(seat.address, tokens, EPHEMERAL)
    _listeners.append(listener)
    ports = list(listener.ports)
    return {"address": seat.address, "ports": ports, "datagram_port": listener.datagram_port}


def _call(tokens: Tokens, told: Mapping[str, object]) -> Answer:
    ports = tuple(cast(Sequence[int], told["ports"]))
    peer = Peer(name="first", address=str(told["address"]), ports=ports)
    link = measure(peer, tokens, _STREAM_S, "second").to_json()
    return json.loads(json.dumps(link))  # type: ignore[no-any-return]  # an object, as Link gives


def _mean(answers: Sequence[Answer], name: str) -> float:
    return fmean(cast(float, answer[name]) for answer in answers)


_listeners: list[ProbeServer] = []
"""In a worker: they listen until it ends."""
