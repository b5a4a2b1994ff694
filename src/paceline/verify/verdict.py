"""The verdict on each number of workers, with what was found and what could not be seen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import final

from paceline.options.figures import plural
from paceline.verify import causes
from paceline.verify.compare import CHAOS, FACTOR, Comparison, Limits, compare
from paceline.verify.detectors import figures, ranks, samples, steps
from paceline.verify.events import Figured, FileRead
from paceline.verify.finding import Case, Detector, Finding, Need
from paceline.verify.source_lines import lines_of
from paceline.verify.trace import Trace

_ALONE = (
    Detector(ranks.unequal_steps, (Need.PLAIN,)),
    Detector(ranks.waits_apart),
)
"""Those that need no second launch, and so can say why the first one failed."""

DETECTORS = (
    Detector(samples.not_finite),
    Detector(samples.decided_by_one, (Need.RANKS, Need.PLAIN)),
    Detector(samples.file_race, (Need.RANKS, Need.PLAIN)),
    Detector(ranks.start, (Need.STEPS,)),
    Detector(samples.no_sampler, (Need.RANKS,)),
    Detector(samples.set_epoch),
    Detector(samples.epoch_ignored),
    Detector(samples.drop_last),
    Detector(samples.shares_overlap, (Need.RANKS,)),
    Detector(samples.padded_training, (Need.RANKS,)),
    Detector(samples.batch, (Need.STEPS,)),
    Detector(samples.batch_skipped, (Need.RANKS,)),
    Detector(samples.padded_evaluation, (Need.RANKS, Need.PLAIN)),
    Detector(samples.dropped_evaluation),
    Detector(ranks.weights_apart),
    Detector(ranks.same_random_numbers, (Need.RANKS, Need.STEPS)),
    Detector(ranks.buffers_apart, (Need.RANKS, Need.PLAIN)),
    Detector(steps.schedule, (Need.STEPS,)),
    Detector(steps.rate_apart),
    Detector(steps.window_left_open, (Need.STEPS, Need.PLAIN)),
    Detector(steps.moved_per_micro_batch, (Need.STEPS,)),
    Detector(steps.batchnorm_share, (Need.BEYOND, Need.SAME_SAMPLES)),
    Detector(steps.gradient_factor, (Need.BEYOND, Need.SAME_SAMPLES)),
    Detector(steps.mean_of_means, (Need.BEYOND, Need.SAME_SAMPLES, Need.PLAIN)),
    Detector(steps.clipped_early, (Need.BEYOND,)),
    Detector(figures.figures),
    *_ALONE,
)
"""All known faults."""

EFFECTS = (
    Detector(samples.other_samples),
    Detector(steps.no_mean_over_samples, (Need.BEYOND, Need.SAME_SAMPLES)),
    Detector(steps.other_values, (Need.BEYOND,)),
    Detector(steps.chance, (Need.BEYOND,)),
    Detector(steps.unknown, (Need.BEYOND,)),
)
"""What other faults would bring about as well: looked for in turn, until one explains it."""

_CHANCE = (causes.CHANCE, causes.DATA_DRAWS)
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

    verdict: Verdict
    trace: Trace
    comparison: Comparison | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.trace.workers


def evaluate_launch(first: Trace, other: Trace, limits: Limits) -> CountVerdict:
    """Compare a launch with the first one, and look for causes."""
    found = compare(first, other)
    beyond = found.first_beyond(limits)
    case = Case(first=first, other=other, comparison=found, beyond=beyond)
    findings = with_lines(_search(case), case)
    return CountVerdict(
        verdict=_verdict(case, findings), comparison=found, findings=findings, trace=other
    )


def evaluate_first(first: Trace) -> CountVerdict:
    """Evaluate the first launch, with which the others are compared."""
    if not first.failure:
        return CountVerdict(verdict=Verdict.FIRST, trace=first)
    alone = Case(first=first, other=first, comparison=compare(first, first), beyond=None)
    found = [failed(first), *(finding for detector in _ALONE for finding in detector(alone))]
    return CountVerdict(verdict=Verdict.FAILED, findings=with_lines(found, alone), trace=first)


def not_run(first: Trace, workers: int) -> CountVerdict:
    """Return the verdict on a launch that wasn't made, since there is none to compare it with."""
    verdict = Verdict.NOT_RUN if first.failure else Verdict.NOTHING
    return CountVerdict(verdict=verdict, trace=Trace(ranks=((),) * workers))


def with_lines(findings: Sequence[Finding], case: Case) -> tuple[Finding, ...]:
    """Add the lines of the script that findings are about."""
    return tuple(replace(f, lines=lines_of(f, case.other)) for f in findings)


def failed(trace: Trace) -> Finding:
    """Say why a launch failed."""
    if not any(word in trace.failure for word in _WITHOUT_GPU):
        return Finding(cause=causes.FAILED, workers=trace.workers, what=trace.failure)
    what = f"the script asks for a GPU that the workers here don't have: {trace.failure}"
    return Finding(cause=causes.NEEDS_GPU, workers=trace.workers, what=what)


def needs_yardstick(first: Trace, others: Sequence[Trace]) -> bool:
    """Tell whether it has to be measured how far rounding alone goes."""
    found = [compare(first, other) for other in others if not other.failure]
    return any(c.differences and c.differences[0].same_samples and not c.same_bits for c in found)


def _search(case: Case) -> list[Finding]:
    alone = Detector(ranks.no_communication, (Need.RANKS, Need.PLAIN))(case)
    found = [*alone, *([failed(case.other)] if case.other.failure else [])]
    if alone:
        return found  # all else that differs follows from it
    for detector in DETECTORS:
        found += detector(case)
    for detector in EFFECTS:
        if not any(f.makes_different or f.cause in _CHANCE for f in found):
            found += detector(case)
    return found


def _verdict(case: Case, findings: Sequence[Finding]) -> Verdict:
    if case.other.failure:
        return Verdict.FAILED
    if not case.comparison.differences and case.other.breaks_at is None:
        return Verdict.NOTHING
    if any(finding.makes_different for finding in findings):
        return Verdict.DIFFERENT
    if case.comparison.same_bits:
        return Verdict.SAME_BITS
    is_chance = any(finding.cause in _CHANCE for finding in findings)
    return Verdict.CHANCE if is_chance else Verdict.ROUNDING


def unseen(traces: Sequence[Trace], limits: Limits, *, cut_at: int, dropout: bool) -> Iterator[str]:
    """Say what could not be seen, one sentence each."""
    if any(trace.failure for trace in traces):
        return
    # Without a step nothing else can be said.
    idle = next((trace for trace in traces if not trace.steps), None)
    if idle is not None:
        yield from _unseen_without_steps(idle)
        return
    # What of the data was seen, by how the script trains.
    if traces[0].in_session:
        if not all(s.training() and s.training()[0].is_whole for s in traces):
            yield (
                f"the end of an epoch wasn't reached in {plural(cut_at, 'step')}: its short last "
                "batch would not show (--steps)"
            )
        if not all(trace.by_rank_0(Figured) for trace in traces):
            yield "no evaluation by s.evaluate was seen"
    elif not traces[0].training():
        yield "no DataLoader was used: which samples a step sees isn't known"
    else:
        yield from _unseen_of_loaders(traces, cut_at)
    if dropout:
        yield (
            "dropout was left out of the comparison: on another number of workers it draws other "
            "numbers. Who draws the same ones was looked at"
        )
    # From here on the limits themselves are so wide that they would excuse any fault.
    chaos = next((n for n, size in enumerate(limits.weights, 1) if size > CHAOS * FACTOR), None)
    if limits.measured and chaos is not None:
        yield f"after step {chaos} rounding alone takes the weights far apart: not compared"


def _unseen_without_steps(trace: Trace) -> Iterator[str]:
    yield (
        f"nothing to compare: on {plural(trace.workers, 'worker')} no optimizer took a step "
        "(optimizers that inherit torch's are seen)"
    )
    if read := trace.by_rank_0(FileRead):
        yield f"it has read {read[0].path}: is the training over there? Verify it without that file"
    if trace.programs:
        yield (
            "what other programs do, which the script has started: "
            f"{'; '.join(trace.programs[:3])}. Verify the script that "
            "trains, or have it train in its own process where RANK is in the environment"
        )


def _unseen_of_loaders(traces: Sequence[Trace], cut_at: int) -> Iterator[str]:
    epochs = [trace.training() for trace in traces]
    if not all(found and found[0].is_whole for found in epochs):
        yield (
            f"the end of an epoch wasn't reached in {plural(cut_at, 'step')}: dropped or repeated "
            "samples and a short last batch would not show (--steps)"
        )
    if any(len(found) < 2 for found in epochs):
        yield "only one epoch was seen: whether each has an order of its own would not show"
    evaluations = [trace.evaluations() for trace in traces]
    if not all(evaluations):
        yield "no evaluation by a DataLoader was seen"
    elif not all(found[0].is_whole for found in evaluations):
        yield "the end of an evaluation wasn't reached: samples counted twice would not show"
