"""The verdict on each number of workers, with what was found and what could not be seen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import final

from paceline.options.figures import plural
from paceline.verify.compare import CHAOS, FACTOR, Comparison, Limits, compare
from paceline.verify.detectors import figures, ranks, samples, steps
from paceline.verify.finding import Case, Cause, Detector, Finding
from paceline.verify.source_lines import lines_of
from paceline.verify.trace import Trace

DETECTORS: tuple[Detector, ...] = (
    ranks.models,
    ranks.start,
    samples.no_sampler,
    samples.set_epoch,
    samples.drop_last,
    samples.shares_overlap,
    samples.padded_training,
    samples.batch,
    samples.padded_evaluation,
    samples.dropped_evaluation,
    ranks.unequal_steps,
    ranks.waits_apart,
    ranks.weights_apart,
    ranks.same_random_numbers,
    ranks.buffers_apart,
    ranks.modes_apart,
    steps.no_gradient,
    steps.schedule_per_worker,
    steps.rate_apart,
    steps.batchnorm_share,
    steps.gradient_factor,
    steps.mean_of_means,
    steps.clipped_early,
    figures.metrics,
    figures.figures,
)


_WITHOUT_GPU = (
    "Torch not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "no NVIDIA driver",
    "on a CUDA device but torch.cuda.is_available() is False",
    "CUDA driver initialization failed",
    "no CUDA-capable device",
    "invalid device ordinal",
    "CUDA driver version is insufficient",
    "device_ids and output_device arguments only work with",
)
"""What torch says where a script uses a GPU that isn't there."""


class Verdict(StrEnum):
    """How a training on another number of workers compares."""

    FIRST = "-"
    SAME_BITS = "same bits"
    ROUNDING = "same to rounding"
    CHANCE = "same but for chance"
    DIFFERENT = "different"
    FAILED = "failed"
    NOTHING = "nothing to compare"
    NOT_RUN = "not run"


@final
@dataclass(frozen=True, kw_only=True)
class CountVerdict:
    """One number of workers."""

    workers: int
    verdict: Verdict
    comparison: Comparison | None
    findings: tuple[Finding, ...]
    trace: Trace


def evaluate_launch(first: Trace, other: Trace, limits: Limits) -> CountVerdict:
    """Compare a launch with the first one, and look for causes."""
    comparison = compare(first, other)
    case = Case(
        first=first,
        other=other,
        comparison=comparison,
        beyond=comparison.first_beyond(limits),
    )
    findings = tuple(replace(f, lines=lines_of(f, case)) for f in _search(case))
    return CountVerdict(
        workers=other.workers,
        verdict=_verdict(case, findings),
        comparison=comparison,
        findings=findings,
        trace=other,
    )


def evaluate_first(first: Trace) -> CountVerdict:
    """Evaluate the first launch, with which the others are compared."""
    findings = []
    # Only detectors that need no second launch can say why it failed.
    if first.failure:
        findings = [failed(first)]
        alone = Case(first=first, other=first, comparison=compare(first, first), beyond=None)
        for detector in (steps.no_gradient, ranks.unequal_steps, ranks.waits_apart):
            findings += [replace(f, lines=lines_of(f, alone)) for f in detector(alone)]
    return CountVerdict(
        workers=first.workers,
        verdict=Verdict.FAILED if first.failure else Verdict.FIRST,
        comparison=None,
        findings=tuple(findings),
        trace=first,
    )


def failed(trace: Trace) -> Finding:
    """Say why a launch failed."""
    is_gpu = any(word in trace.failure for word in _WITHOUT_GPU)
    if not is_gpu:
        return Finding(cause=Cause.FAILED, workers=trace.workers, what=trace.failure)
    what = f"the script asks for a GPU that the workers here don't have: {trace.failure}"
    return Finding(cause=Cause.NEEDS_GPU, workers=trace.workers, what=what)


def not_run(workers: int) -> CountVerdict:
    """Give the verdict on a launch that wasn't made, since there is none to compare it with."""
    return CountVerdict(
        workers=workers,
        verdict=Verdict.NOT_RUN,
        comparison=None,
        findings=(),
        trace=Trace(workers=workers),
    )


def needs_yardstick(first: Trace, others: Sequence[Trace]) -> bool:
    """Tell whether it has to be measured how far rounding alone goes."""
    found = [compare(first, other) for other in others if not other.failure]
    return any(c.differences and c.differences[0].same_samples and not c.same_bits for c in found)


def _search(case: Case) -> Iterator[Finding]:
    found: list[Finding] = list(ranks.no_communication(case))
    if case.other.failure:
        found.append(failed(case.other))
    if found_any(found, Cause.NO_COMMUNICATION):
        yield from found  # all else that differs follows from it
        return
    # All known faults; then, only where none explains the difference, what others would bring
    # about as well: other samples, unequal weights, chance.
    for detector in DETECTORS:
        found += detector(case)
    if not _explained(found):
        found += samples.other_samples(case)
    if not _explained(found):
        found += steps.no_mean_over_samples(case)
    if not _explained(found):
        found += steps.other_values(case)
    if not _explained(found):
        found += steps.chance(case)
    # A difference beyond rounding that nothing explains.
    if case.beyond is not None and not found_any(found, Cause.CHANCE) and not _explained(found):
        beyond = case.beyond
        what = (
            f"the gradients of step {beyond.step} are apart by {beyond.gradients:.1e}, the weights "
            f"after it by {beyond.weights:.1e}, most of all {beyond.first_tensor or 'by weights'}"
        )
        found.append(case.found_beyond(Cause.UNKNOWN, what))
    yield from found


def found_any(findings: Sequence[Finding], cause: Cause) -> bool:
    """Tell whether a cause is among the findings."""
    return any(finding.cause == cause for finding in findings)


def _explained(findings: Sequence[Finding]) -> bool:
    return any(finding.makes_different for finding in findings)


def _verdict(case: Case, findings: Sequence[Finding]) -> Verdict:
    if case.other.failure:
        return Verdict.FAILED
    if not case.comparison.differences:
        return Verdict.NOTHING
    if _explained(findings):
        return Verdict.DIFFERENT
    if case.comparison.same_bits:
        return Verdict.SAME_BITS
    if found_any(findings, Cause.CHANCE):
        return Verdict.CHANCE
    return Verdict.ROUNDING


def unseen(traces: Sequence[Trace], limits: Limits, *, cut_at: int, dropout: bool) -> Iterator[str]:
    """Say what could not be seen, one sentence each."""
    first = traces[0]
    if any(trace.failure for trace in traces):
        return
    # Without a step nothing else can be said.
    idle = [trace.workers for trace in traces if not trace.steps]
    if idle:
        yield (
            f"nothing to compare: on {plural(idle[0], 'worker')} no optimizer took a step "
            "(optimizers that inherit torch's are seen)"
        )
        if programs := list(dict.fromkeys(p for trace in traces for p in trace.programs)):
            yield (
                f"what other programs do, which the script has started: {'; '.join(programs[:3])}. "
                "Verify the script that trains"
            )
        return
    # What of the data was seen, by how the script trains.
    if first.in_session:
        if not all(s.training() and s.training()[0].is_whole for s in traces):
            yield (
                f"the end of an epoch wasn't reached in {plural(cut_at, 'step')}: its short last "
                "batch would not show (--steps)"
            )
        if not all(trace.figured for trace in traces):
            yield "no evaluation by s.evaluate was seen"
    elif not first.training():
        yield "no DataLoader was used: which samples a step sees isn't known"
    else:
        yield from _unseen_of_loaders(traces, cut_at)
    if dropout:
        yield (
            "dropout was left out of the comparison: on another number of workers it draws other "
            "numbers. Who draws the same ones was looked at"
        )
    # From here on the limits themselves are so wide that they would excuse any fault.
    chaos = next((n for n, size in enumerate(limits.weights) if size > CHAOS * FACTOR), None)
    if limits.measured and chaos is not None:
        yield f"after step {chaos} rounding alone takes the weights far apart: not compared"


def _unseen_of_loaders(traces: Sequence[Trace], cut_at: int) -> Iterator[str]:
    epochs = [trace.training() for trace in traces]
    if not all(found and found[0].is_whole for found in epochs):
        yield (
            f"the end of an epoch wasn't reached in {plural(cut_at, 'step')}: dropped or repeated "
            "samples and a short last batch would not show (--steps)"
        )
    if any(len(found) < 2 for found in epochs):
        yield "only one epoch was seen: whether each has an order of its own would not show"
    if not all(trace.evaluations() for trace in traces):
        yield "no evaluation by a DataLoader was seen"
