"""Faults between ranks that would take a script's timeout to show."""

from dataclasses import replace

import pytest

from paceline.verify.compare import compare, given_limits
from paceline.verify.detectors.ranks import buffers_apart
from paceline.verify.detectors.samples import shares_overlap
from paceline.verify.events import Drawn, Drew, Evaluated, Event, Met, PassEnded
from paceline.verify.finding import Case
from paceline.verify.trace import cut_up_before
from paceline.verify.verdict import Verdict, evaluate_first, evaluate_launch
from tests.verify.made import begun, stepped, trace_of, trained


def rank_of(batches: int, *, ends: bool) -> list[Event]:
    steps: list[Event] = [e for n in range(batches) for e in trained([str(n)], 1.0, 1.0)]
    return [begun(0, 0, replicas=2), *steps, *([PassEnded(0, 0, False)] if ends else [])]


def test_a_rank_that_waits_in_vain() -> None:
    first = trace_of([rank_of(3, ends=True)])
    other = trace_of([rank_of(3, ends=False), rank_of(2, ends=True)], "rank 0: timed out")
    found = evaluate_launch(first, other, given_limits(0.0))
    assert found.verdict == Verdict.FAILED
    assert "unequal-steps" in [str(f.cause) for f in found.findings]
    assert "rank 0: 3, rank 1: 2" in " ".join(f.what for f in found.findings)


def test_a_first_launch_that_fails() -> None:
    found = evaluate_first(trace_of([[]], "rank 0: KeyError"))
    assert (found.verdict, [f.what for f in found.findings]) == (
        Verdict.FAILED,
        ["rank 0: KeyError"],
    )


@pytest.mark.parametrize(
    ("seeds", "subsets", "what"),
    [
        ((0, 0), ("a", "a"), ""),
        ((0, 5), ("a", "a"), "the ranks' DistributedSamplers have different seeds (0, 5)"),
        ((0, 0), ("a", "b"), "each rank shares out another part of the data set"),
    ],
)
def test_ranks_that_share_out_different_orders(
    seeds: tuple[int, int], subsets: tuple[str, str], what: str
) -> None:
    first = trace_of([[begun(0, 0, samples=4), *trained(["0", "1", "2", "3"], 1.0, 1.0)]])
    ranks: list[list[Event]] = [
        [
            Met(False),
            begun(0, 0, samples=4, replicas=2, seed=seed, subset=subset),
            *trained(["0", "1"], 1.0, 1.5),
            PassEnded(0, 0, False),
        ]
        for seed, subset in zip(seeds, subsets, strict=True)
    ]
    found = evaluate_launch(first, trace_of(ranks), given_limits(0.0))
    causes = [str(f.cause) for f in found.findings]
    assert ("shares-overlap" in causes) == bool(what)
    assert ("padded-training" in causes) == (not what)
    assert any(what in f.what for f in found.findings)


def test_data_that_ranks_cut_up_by_themselves() -> None:
    def rank_with(looks: list[str]) -> list[Event]:
        indices = tuple(str(n) for n in range(len(looks)))
        _, *step = trained(indices, 1.0, 1.0)
        return [
            Met(False),
            begun(0, 0, samples=len(looks)),
            Drawn(0, 0, indices, tuple(looks)),
            *step,
        ]

    first = trace_of([rank_with(["a", "b", "c", "d"])])
    other = trace_of([rank_with(["a", "c"]), rank_with(["b", "d"])])
    assert cut_up_before(first, first) == cut_up_before(first, trace_of([[]])) == set()
    loaders = cut_up_before(first, other)
    assert loaders == {0}
    one, two = (replace(trace, by_content=loaders) for trace in (first, other))
    assert evaluate_launch(one, two, given_limits(0.0)).verdict == Verdict.SAME_BITS
    assert evaluate_launch(first, other, given_limits(0.0)).verdict == Verdict.DIFFERENT


def test_ranks_whose_samplers_are_told_different_epochs() -> None:
    batch: list[Event] = [Drawn(0, 1, ("1",), ()), *trained(["1"], 1.0, 1.0)[1:]]
    ranks: list[list[Event]] = [
        [replace(begun(0, 1, replicas=2), epoch=epoch), *batch] for epoch in (1, 0)
    ]
    other = trace_of(ranks)
    case = Case(first=other, other=other, comparison=compare(other, other), beyond=None)
    (found,) = shares_overlap(case)
    assert (str(found.cause), found.makes_different) == ("shares-overlap", True)
    assert "DistributedSamplers have different epochs (1, 0)" in found.what


@pytest.mark.parametrize("accused", [True, False])
def test_ranks_seeded_alike_whose_samples_come_out_alike_anyway(accused: bool) -> None:
    """A data set may seed by sample: the state that it was found in then doesn't count."""

    def rank_with(samples: str, look: str) -> list[Event]:
        drawn = Drawn(0, 0, tuple(samples), tuple(look * len(samples)))
        return [Met(False), Drew("data 0", "state"), drawn, *trained([], 1.0, 1.0)[1:]]

    first = trace_of([rank_with("ab", "x")])
    other = trace_of([rank_with("a", "y" if accused else "x"), rank_with("b", "x")])
    found = evaluate_launch(first, other, given_limits(0.0)).findings
    assert ["same-augmentation"] * accused == [str(f.cause) for f in found]


@pytest.mark.parametrize("accused", [True, False])
def test_buffers_are_compared_after_as_many_steps(accused: bool) -> None:
    """Rank 0 may look at what it has learned by itself."""
    looking: list[Event] = [Evaluated({"mean": "a"}), stepped(1.0), Evaluated({"mean": "b"})]
    own: list[Event] = [stepped(1.0), Evaluated({"mean": "c" if accused else "b"})]
    other = trace_of([looking, own])
    case = Case(first=other, other=other, comparison=compare(other, other), beyond=None)
    found = [str(finding.cause) for finding in buffers_apart(case)]
    assert found == ["buffers-apart"] * accused
