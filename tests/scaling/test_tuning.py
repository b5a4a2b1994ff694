"""What is tried to make a training faster, and what follows from the trials."""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

import numpy
import pytest

from paceline.scaling.tuning import (
    PAIRS,
    Change,
    Facts,
    Gain,
    Kind,
    Tried,
    advise_on_data,
    best_together,
    keeps_quality,
    list_changes,
    together,
)

SETTINGS: Mapping[str, object] = {
    "precision": "fp32",
    "loader_workers": 2,
    "compile": False,
    "shards": None,
}
FACTS = Facts(
    device="cpu",
    nodes=1,
    workers=2,
    threads=1,
    cores=2,
    global_batch=64,
    waits_for_data=0.0,
    sync="allreduce",
    loader_workers=None,
    channels_last=True,
    batchnorm_per_worker=False,
    settings=SETTINGS,
)


def named(facts: Facts, *given: str) -> dict[str, Kind]:
    return {change.name: change.kind for change in list_changes(facts, given)}


def test_what_is_tried_on_two_cores() -> None:
    assert named(FACTS) == {
        "compile": "rounding",
        "contiguous": "rounding",
        "bf16": "quality",
        "1x2": "rounding",
        "halves": "rounding",
    }


@pytest.mark.parametrize(
    ("facts", "tried"),
    [
        (replace(FACTS, channels_last=False), {"compile", "bf16", "1x2", "halves"}),
        (
            replace(FACTS, settings={**SETTINGS, "sync_batchnorm": True}),
            {"compile", "contiguous", "bf16", "1x2"},
        ),
        (replace(FACTS, global_batch=30), {"compile", "contiguous", "bf16", "1x2"}),
        (
            replace(FACTS, settings={**SETTINGS, "shards": 2}),
            {"compile", "contiguous"},  # the others would change the bits, or are refused
        ),
        (
            replace(FACTS, settings={**SETTINGS, "compile": True, "precision": "bf16"}),
            {"contiguous", "1x2", "halves"},
        ),
        (
            replace(FACTS, settings={**SETTINGS, "batch_per_worker": 32}),
            {"compile", "contiguous", "bf16", "halves"},  # fewer workers: another global batch
        ),
        (
            replace(FACTS, device="cuda", channels_last=False),
            {"compile", "cuda-graphs", "bf16", "halves", "quarters"},
        ),
        (
            replace(FACTS, device="cuda"),
            {
                *("compile", "contiguous", "cudnn-benchmark"),
                *("cuda-graphs", "bf16", "halves", "quarters"),
            },
        ),
        (
            replace(
                FACTS,
                device="cuda",
                global_batch=32,  # 16 a worker
                settings={**SETTINGS, "deterministic": True},
            ),
            {"compile", "contiguous", "cuda-graphs", "bf16", "halves"},
        ),
        (
            replace(FACTS, device="cuda", settings={**SETTINGS, "shards": 2}),
            {"compile", "contiguous"},  # graphs are refused there
        ),
        (
            replace(FACTS, waits_for_data=0.1, cores=1, workers=1),
            {"compile", "contiguous", "bf16", "halves", "loaders-0", "loaders-1"},
        ),
        (
            replace(FACTS, waits_for_data=0.1, loader_workers=0),
            {"compile", "contiguous", "bf16", "1x2", "halves"},  # the script has settled it
        ),
        (
            replace(FACTS, cores=4, workers=4, global_batch=40),
            {"compile", "contiguous", "bf16", "1x4", "2x2"},
        ),
    ],
)
def test_what_is_tried_follows_from_the_first_trial(facts: Facts, tried: set[str]) -> None:
    assert set(named(facts)) == tried


def test_graphs_are_never_taken_together_with_compiled_code() -> None:
    on_gpu = {change.name: change for change in list_changes(replace(FACTS, device="cuda"))}
    gain = Gain(ratios=(1.5,) * PAIRS)
    tried = [Tried(change=on_gpu[name], gain=gain) for name in ("compile", "cuda-graphs")]
    assert len(best_together(tried)) == 1
    without_compile = named(replace(FACTS, device="cuda"), "compile")
    assert "cuda-graphs" in without_compile  # as the user has it, nothing else changes
    assert "compile" not in without_compile


def test_what_the_user_has_settled_stays() -> None:
    assert set(named(FACTS, "compile", "threads", "precision")) == {"contiguous", "halves"}


def test_other_batches_of_a_worker_may_change_results_where_batchnorm_sees_them() -> None:
    kinds = named(replace(FACTS, batchnorm_per_worker=True))
    assert (kinds["1x2"], kinds["halves"], kinds["contiguous"]) == (
        "quality",
        "quality",
        "rounding",
    )


def test_bounds_are_those_of_students_t() -> None:
    """By its definition: a normal mean over the root of an independent chi-squared one."""
    ratios = (1.30, 1.22, 1.41, 1.27)
    random = numpy.random.default_rng(0)
    draws = random.standard_normal((400_000, 4))
    t = draws.mean(axis=1) / (draws.std(axis=1, ddof=1) / 2)
    quantile = numpy.quantile(t, 0.975)
    logs = numpy.log(ratios)
    half = quantile * logs.std(ddof=1) / 2
    low, high = Gain(ratios=ratios).bounds
    assert low == pytest.approx(math.exp(logs.mean() - half), rel=0.01)
    assert high == pytest.approx(math.exp(logs.mean() + half), rel=0.01)


def test_bounds_of_many_pairs_are_nearly_normal() -> None:
    low, high = Gain(ratios=(1.0, 1.1) * 20).bounds
    half = NormalDist().inv_cdf(0.975) * numpy.log((1.0, 1.1) * 20).std(ddof=1) / 40**0.5
    assert math.log(high / low) == pytest.approx(2 * half, rel=0.01)


def test_one_pair_says_nothing_for_sure() -> None:
    assert Gain(ratios=(2.0,)).bounds == (0.0, math.inf)
    assert not Gain(ratios=(2.0, 2.0)).is_faster
    assert Gain(ratios=(2.0, 2.0, 2.0)).is_faster


@pytest.mark.parametrize(
    ("ratios", "hopeless", "settled"),
    [
        ((), False, False),
        ((0.89,), True, False),
        ((0.95,), False, False),
        ((0.95, 1.0), True, False),
        ((0.95, 1.2, 1.0), False, False),
        ((0.99, 0.98, 0.99), False, True),
        ((1.4, 1.5, 1.45), False, True),
    ],
)
def test_which_pairs_are_enough(
    ratios: tuple[float, ...], *, hopeless: bool, settled: bool
) -> None:
    gain = Gain(ratios=ratios)
    assert (gain.should_prune, gain.is_settled) == (hopeless, settled)


def test_what_starts_later_pays_in_long_trainings() -> None:
    """Half as long a step, and a minute to start: from two minutes on."""
    gain = Gain().with_pair(100, 200, 60.0).with_pair(100, 200, 5.0)
    assert gain.start_s == 60.0
    assert gain.pays_after_s == pytest.approx(120.0)
    assert Gain().with_pair(100, 200, 0.4).pays_after_s == 0.0
    assert Gain().with_pair(100, 90, 60.0).pays_after_s == math.inf


def tried(name: str, mean: float, kind: Kind = "rounding", **settings: int) -> Tried:
    change = Change(name=name, settings=settings or {name: 1}, kind=kind)
    return Tried(change=change, gain=Gain(ratios=(mean,) * 3))


def test_the_best_that_dont_contradict_each_other_are_taken_together() -> None:
    every = [
        tried("a", 1.1),
        tried("b", 1.5, workers=1, threads=2),
        tried("c", 1.2, workers=2, threads=3),
        tried("d", 0.9),
        tried("e", 2.0, "quality"),
        Tried(change=Change(name="f", settings={"f": 1}, kind="same bits")),
        replace(tried("g", 1.3), gain=Gain(ratios=(1.3, 1.3, 1.3), problem="it failed")),
    ]
    chosen = best_together(every)
    assert [each.change.name for each in chosen] == ["b", "a"]
    both = together([each.change for each in chosen])
    assert both == Change(
        name="b+a", settings={"workers": 1, "threads": 2, "a": 1}, kind="rounding"
    )


def test_what_may_change_results_is_taken_only_where_they_are_as_good() -> None:
    faster = tried("bf16", 1.5, "quality")
    assert not faster.is_recommended
    assert "--check-quality" in faster.verdict
    as_good = replace(faster, losses=((1.0, 1.02, 0.98), (1.01, 1.0, 1.0)))
    assert (as_good.is_recommended, as_good.verdict) == (True, "faster, as good")
    worse = replace(faster, losses=((1.0, 1.02, 0.98), (1.1, 1.0, 1.1)))
    assert (worse.is_recommended, worse.verdict) == (False, "faster, but worse")


def test_how_much_worse_a_loss_may_be() -> None:
    assert keeps_quality([1.0], [1.01])
    assert not keeps_quality([1.0], [1.02])
    assert keeps_quality([0.9, 1.1], [1.14])  # one standard deviation, 0.141
    assert not keeps_quality([0.9, 1.1], [1.15])
    assert keeps_quality([1.0], [0.1])


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        (Gain(), "not tried: no time left"),
        (Gain(problem="it failed"), "failed: it failed"),
        (Gain(ratios=(1.2, 1.3)), "not settled: no time left"),
        (Gain(ratios=(0.5,)), "no sure gain"),
        (Gain(ratios=(1.0, 1.1, 0.9)), "no sure gain"),
        (Gain(ratios=(1.2, 1.3, 1.25)), "faster"),
    ],
)
def test_verdicts(gain: Gain, verdict: str) -> None:
    change = Change(name="a", settings={"a": 1}, kind="rounding")
    tried = Tried(change=change, gain=gain)
    assert tried.verdict == verdict
    stopped = verdict.replace("no time left", "stopped")
    assert replace(tried, is_stopped=True).verdict == stopped


def test_over_hosts_what_sends_less_is_tried_and_workers_stay() -> None:
    kinds = named(replace(FACTS, nodes=2))
    assert {name: kinds[name] for name in kinds if name.startswith("sync-")} == {
        "sync-bf16": "quality",
        "sync-powersgd": "quality",
        "sync-local": "quality",
    }
    assert not [name for name in kinds if "x" in name]
    assert "sync-local" not in named(replace(FACTS, nodes=2, sync="local"))
    shared = {**SETTINGS, "shards": 4}
    assert not [n for n in named(replace(FACTS, nodes=2, settings=shared)) if "sync" in n]
    assert not [name for name in named(FACTS) if name.startswith("sync-")]


def test_what_faster_data_could_bring_is_said() -> None:
    assert advise_on_data(FACTS) is None
    advice = advise_on_data(replace(FACTS, waits_for_data=0.5))
    assert advice is not None
    assert "50 % of their time: at most 2.00 times as fast" in advice
