"""What a worker of a fleet does: trainings of emulated networks, and measurements of its link."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import paceline
from benchmarks.emulated import NETWORKS, Emulated, scale_buckets, wake_exactly
from benchmarks.fleet import Answer, Fleet, Seat
from benchmarks.ordered_hosts import sent_bytes
from paceline.doctor.facts import EPHEMERAL
from paceline.doctor.probes.client import Peer, measure
from paceline.doctor.probes.handshake import Tokens
from paceline.doctor.probes.server import ProbeServer
from paceline.options.fields import OptionValue
from paceline.results.profile import StepProfile

Settings = Mapping[str, OptionValue]

BATCH = 32
"""Images of a worker, which nobody looks at."""
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured in the steps that count: means over the workers."""

    step_s: float
    sent_bytes: float
    """By one worker in a step, headers included, as its interface counts them."""
    profile: StepProfile
    """What the training itself says."""


def run(trial: Trial, workers: Fleet, name: str) -> Outcome:
    """Train once on the first workers of a fleet.

    Args:
        trial: What is trained.
        workers: At least as many as it wants.
        name: Of its run directory, a new one; shown on stderr with the result.
    """
    directory = workers.scratch / name
    meeting, told = workers.meeting(), asdict(trial)
    request = {"do": "train", "meeting": meeting, "run_dir": str(directory), "trial": told}
    answers = workers.ask([request] * trial.workers)
    step_s = _mean(answers, "step_s")
    print(f"{name}: {1000 * step_s:.0f} ms a step", file=sys.stderr, flush=True)
    return Outcome(
        step_s=step_s,
        sent_bytes=_mean(answers, "sent_bytes") if workers.places[0] else 0.0,
        profile=StepProfile.read(directory / "profile.json"),
    )


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
        case "ring":
            return _small_all_reduce(seat, cast(int, request["workers"]), str(request["meeting"]))
        case "listen":
            return _listen(seat, Tokens(**cast(dict[str, str], request["tokens"])))
        case "call":
            tokens = Tokens(**cast(dict[str, str], request["tokens"]))
            return _call(tokens, cast(dict[str, object], request["peer"]))
    return {}


def _place(seat: Seat, workers: int, meeting: str) -> Settings:
    return {"init_method": meeting, "rank": seat.number, "world_size": workers}


def _train(seat: Seat, trial: Trial, meeting: str, run_dir: Path) -> Answer:
    shape = NETWORKS[trial.network]()
    scale_buckets(shape)
    wake_exactly()
    batch, steps = BATCH * trial.workers, trial.lead + trial.steps + 1
    data = TensorDataset(torch.zeros(steps * batch, 1), torch.zeros(steps * batch))
    edges = (trial.lead, trial.lead + trial.steps)
    place = _place(seat, trial.workers, meeting)
    options: Any = {**_USUAL, "interface": seat.interface, **place, **trial.settings}
    with paceline.session(run_dir, **options) as s:
        network = s.model(Emulated(shape, trial.compute_s, seat.number))
        s.optimizer(torch.optim.SGD(network.parameters(), lr=1e-3))
        batches: Any = s.loader(data, global_batch=batch)
        for _ in s.epochs(1):
            stamps, sent = [], []
            for step, (images, _) in enumerate(batches):
                stamps.append(perf_counter())
                if step in edges:
                    sent.append(sent_bytes(seat.interface))
                s.step(network(images))
    counted = stamps[trial.lead : trial.lead + trial.steps + 1]
    return {
        "step_s": (counted[-1] - counted[0]) / trial.steps,
        "sent_bytes": (sent[1] - sent[0]) / trial.steps,
    }


def _small_all_reduce(seat: Seat, workers: int, meeting: str) -> Answer:
    os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    place: Any = _place(seat, workers, meeting)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S), **place)
    values = torch.ones(workers)
    dist.all_reduce(values)
    stamps = [perf_counter()]
    for _ in range(_SMALL):
        dist.all_reduce(values.fill_(1.0))
        stamps.append(perf_counter())
    dist.barrier()
    dist.destroy_process_group()
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
