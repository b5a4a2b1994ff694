"""Faults between ranks that would take a script's timeout to show."""

from paceline.verify.compare import given_limits
from paceline.verify.events import Event, PassEnded
from paceline.verify.trace import collect_trace
from paceline.verify.verdict import Verdict, evaluate_first, evaluate_launch
from tests.verify.made import begun, trained


def rank_of(batches: int, *, ends: bool) -> list[Event]:
    steps: list[Event] = [e for n in range(batches) for e in trained([str(n)], 1.0, 1.0)]
    return [begun(0, 0, replicas=2), *steps, *([PassEnded(0, 0, False)] if ends else [])]


def test_a_rank_that_waits_in_vain() -> None:
    first = collect_trace([rank_of(3, ends=True)])
    other = collect_trace([rank_of(3, ends=False), rank_of(2, ends=True)], "rank 0: timed out")
    found = evaluate_launch(first, other, given_limits(0.0))
    assert found.verdict == Verdict.FAILED
    assert "unequal-steps" in [str(f.cause) for f in found.findings]
    assert "rank 0: 3, rank 1: 2" in " ".join(f.what for f in found.findings)


def test_a_first_launch_that_fails() -> None:
    found = evaluate_first(collect_trace([[]], "rank 0: KeyError"))
    assert (found.verdict, [f.what for f in found.findings]) == (
        Verdict.FAILED,
        ["rank 0: KeyError"],
    )
