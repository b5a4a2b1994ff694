"""Compares a training that was killed and started again with an uninterrupted one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from paceline.options.figures import listed, plural
from paceline.verify import causes, resume_causes
from paceline.verify.compare import Comparison, Limits, compare
from paceline.verify.detectors.ranks import taken
from paceline.verify.events import Drew, Scaled, Stepped
from paceline.verify.finding import Case, Finding
from paceline.verify.source_lines import lines_of
from paceline.verify.tensor_sketch import TensorSketch, relative_distance
from paceline.verify.trace import Step, Trace
from paceline.verify.verdict import Verdict, failed

_SHOWN = 3


@final
@dataclass(frozen=True, kw_only=True)
class Launches:
    """The three launches of one command, and what is known of them."""

    whole: Trace
    """Nobody disturbed it."""
    killed: Trace
    resumed: Trace
    kill_at: int
    """Steps that the killed one took."""
    saved: tuple[str, ...]
    """Files that it had written by then."""
    cut_at: int
    """Steps after which an epoch is cut off."""


@final
@dataclass(frozen=True, kw_only=True)
class ResumeResult:
    """The result of `paceline verify --resume`."""

    launches: Launches
    verdict: Verdict
    begins_at: int | None
    """Steps that the resumed one takes for done; None where it took none itself."""
    before: Comparison
    """The killed one against the undisturbed one."""
    after: Comparison | None
    """The resumed one against the undisturbed one, from there on."""
    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]
    limits: Limits
    """What counts as rounding."""

    @property
    def is_good(self) -> bool:
        """Whether it is the same training."""
        return self.verdict in (Verdict.SAME_BITS, Verdict.ROUNDING)


def choose_step(whole: Trace, chance: float) -> int:
    """Choose after which step to kill a training: in the second of three epochs.

    Args:
        whole: The undisturbed launch, of at least two steps.
        chance: From 0 to below 1.

    Returns:
        Steps that are taken before, fewer than all.
    """
    steps = len(whole.steps)
    least = min(steps - 1, steps // 3 + 1)
    most = max(least, 2 * steps // 3)
    return least + int(chance * (most - least + 1))


def compare_resumed(launches: Launches, limits: Limits) -> ResumeResult:
    """Find where the resumed launch begins, and what it does otherwise from there on.

    Args:
        launches: All three; the undisturbed one took steps and didn't fail.
    """
    whole, resumed = launches.whole, launches.resumed
    # Until the kill both launches should be the same.
    before = compare(whole, launches.killed)
    found, unseen = list(_before_the_kill(launches, before, limits)), list[str]()
    # From where the resumed one begins on, too, if what came before allows to say so.
    begins_at, after = None, None
    if resumed.failure:
        found.append(failed(resumed))
    elif not resumed.steps:
        unseen.append("the resumed launch took no step: is the training over by then?")
    elif not found:
        begins_at, apart = _beginning(whole, resumed, launches.kill_at)
        rest = replace(whole, only=whole.steps[begins_at : _end(launches, begins_at)])
        resumed = _without_skipped(rest, resumed)
        after = compare(rest, resumed)
        case = Case(first=rest, other=resumed, comparison=after, beyond=after.first_beyond(limits))
        if begins_at == 0 and not launches.saved:
            unseen.append(
                f"nothing was written in {plural(launches.kill_at, 'step')}, so it begins anew: "
                "kill it later (--kill-at-step), or have it save earlier"
            )
        else:
            found += _after_the_kill(case, launches, begins_at, apart, limits)
    return ResumeResult(
        launches=launches,
        verdict=_verdict(found, unseen, resumed, after),
        begins_at=begins_at,
        before=before,
        after=after,
        findings=tuple(found),
        unseen=(*unseen, *_unseen(launches, found, begins_at)),
        limits=limits,
    )


def _verdict(
    found: Sequence[Finding], unseen: Sequence[str], resumed: Trace, after: Comparison | None
) -> Verdict:
    if resumed.failure:
        return Verdict.FAILED
    if any(finding.cause == resume_causes.NOT_REPEATABLE for finding in found) or unseen:
        return Verdict.NOTHING
    if found:
        return Verdict.DIFFERENT
    if after is None or not after.differences:
        return Verdict.NOTHING
    return Verdict.SAME_BITS if after.same_bits else Verdict.ROUNDING


def _before_the_kill(launches: Launches, before: Comparison, limits: Limits) -> Iterator[Finding]:
    """Compare the steps before the kill: does the command do the same twice at all?"""
    beyond = before.first_beyond(limits)
    samples = before.samples_differ_from
    steps = [d for d in (samples, beyond.step if beyond else None) if d is not None]
    if not steps:
        return
    step = min(steps)
    what = "samples" if samples == step else "gradients or weights"
    yield Finding(
        cause=resume_causes.NOT_REPEATABLE,
        workers=launches.whole.workers,
        what=f"the same command, launched twice, has other {what} in step {step}",
        step=step,
    )


def _beginning(whole: Trace, resumed: Trace, kill_at: int) -> tuple[int, float]:
    """Find the step whose weights the resumed launch begins with.

    Returns:
        How many steps come before, and how far the weights are from those: 0 for the same bits.
    """
    first = resumed.steps[0]
    apart = [_distance(_weights_before(whole, n, first), first) for n in range(len(whole.steps))]
    least = min(apart)
    nearest = [n for n, size in enumerate(apart) if size == least]
    # Weights may stay as they are for some steps: then the samples tell.
    same = [n for n in nearest if whole.steps[n].all_samples == first.all_samples]
    by_then = [n for n in nearest if n <= kill_at]
    return (same or by_then[-1:] or nearest)[0], least


def _weights_before(whole: Trace, number: int, like: Step) -> Sequence[TensorSketch]:
    """Give the weights of an optimizer before a step: those after the last one that it took."""
    optimizer = like.stepped[0].optimizer
    own = [s.stepped[0] for s in whole.steps if s.stepped[0].optimizer == optimizer]
    steps = [s.stepped[0] for s in whole.steps[:number] if s.stepped[0].optimizer == optimizer]
    if steps:
        return steps[-1].weights
    return own[0].before if own else ()


def _distance(weights: Sequence[TensorSketch], step: Step) -> float:
    begun = step.stepped[0].before
    if len(weights) != len(begun):
        return float("inf")
    return relative_distance(zip(weights, begun, strict=True))


def _end(launches: Launches, begins_at: int) -> int:
    """Say up to which step both can be compared: an epoch that was cut off goes on elsewhere."""
    if not any(found.is_cut for found in launches.whole.training()):
        return len(launches.whole.steps)
    return (begins_at // launches.cut_at + 1) * launches.cut_at


def _without_skipped(rest: Trace, resumed: Trace) -> Trace:
    """Leave out batches that a script only takes to get to the one where it goes on."""
    first, mine = resumed.steps[0], rest.steps[0]
    shares = list(zip(first.samples, mine.samples, strict=True))
    if not all(len(own) and share[-len(own) :] == own for share, own in shares):
        return resumed
    trimmed = replace(
        first,
        samples=mine.samples,
        contents=tuple(
            contents[-len(own) :] for contents, (_, own) in zip(first.contents, shares, strict=True)
        ),
    )
    return replace(resumed, only=(trimmed, *resumed.steps[1:]))


def _after_the_kill(
    case: Case, launches: Launches, begins_at: int, apart: float, limits: Limits
) -> Iterator[Finding]:
    """Compare, after the kill, everything that a checkpoint has to hold."""
    # It began with the first step: no checkpoint was loaded at all.
    if begins_at == 0:
        files = listed([*launches.saved[:_SHOWN]])
        yield case.found(
            resume_causes.NOT_RESUMED,
            f"it was killed after {plural(launches.kill_at, 'step')} and begins with the first one "
            f"again, though it had written {files}",
        )
        return
    # Else each kind of state by itself; where none differs, the gradients that do.
    found = list(_not_restored(case, launches, begins_at, apart, limits))
    if not found and case.beyond is not None:
        beyond = case.beyond
        found = [
            case.found(
                causes.UNKNOWN,
                f"gradients {plural(beyond.step + 1, 'step')} later are apart by "
                f"{beyond.gradients:.1e}, the weights by {beyond.weights:.1e}",
                step=begins_at + beyond.step,
                tensor=beyond.first_tensor,
            )
        ]
    yield from (replace(finding, lines=lines_of(finding, case.other)) for finding in found)


def _not_restored(
    case: Case, launches: Launches, begins_at: int, apart: float, limits: Limits
) -> Iterator[Finding]:
    whole, resumed = case.first.steps, case.other.steps
    # Weights; then optimizer, loss scale and buffers; the schedule; samples and random numbers.
    if apart > limits.of_weights(0):
        yield case.found(
            resume_causes.WEIGHTS_NOT_RESTORED,
            f"it begins with weights that are those of no step: nearest are those after "
            f"{plural(begins_at, 'step')}, {apart:.1e} apart",
            step=begins_at,
        )
    yield from _memory(case, launches.whole, begins_at)
    for step, (mine, theirs) in enumerate(zip(whole, resumed, strict=False)):
        if mine.stepped[0].rates != theirs.stepped[0].rates:
            rates = [listed([f"{r:g}" for r in s.stepped[0].rates]) for s in (theirs, mine)]
            yield case.found(
                resume_causes.SCHEDULE_NOT_RESTORED,
                f"its learning rate is {rates[0]} instead of {rates[1]}",
                step=begins_at + step,
            )
            break
    yield from _data(case, launches.whole, begins_at)


def _memory(case: Case, whole: Trace, begins_at: int) -> Iterator[Finding]:
    """Compare what optimizer, loss scaler and buffers remember."""
    mine, theirs = case.first.steps[0].stepped[0], case.other.steps[0].stepped[0]
    for step, own in _first_steps(case.other):
        steps = [s.stepped[0] for s in whole.steps[: begins_at + step]]
        states = [before.state for before in steps if before.optimizer == own.optimizer]
        if states and own.state_before != states[-1]:
            yield case.found(
                resume_causes.OPTIMIZER_NOT_RESTORED,
                f"the state of its optimizer of {listed(own.names[:_SHOWN])} isn't the one before "
                "that step",
                step=begins_at + step,
            )
            break
    ours, others = (taken(trace.by_rank_0(Scaled)) for trace in (whole, case.other))
    # A step that is skipped has a scale and no place among the steps.
    is_known = len(ours) == len(whole.steps) and others
    if is_known and others[0] != ours[begins_at]:
        yield case.found(
            resume_causes.SCALE_NOT_RESTORED,
            f"its loss scale is {others[0]:g} instead of {ours[begins_at]:g}",
            step=begins_at,
        )
    same_batch = case.comparison.differences[0]
    apart = [n for n, sha in theirs.buffers.items() if mine.buffers.get(n, sha) != sha]
    if apart and same_batch.same_samples and same_batch.same_contents and not same_batch.gradients:
        yield case.found(
            resume_causes.BUFFERS_NOT_RESTORED,
            f"{listed(apart[:_SHOWN])} differ after the first step",
            step=begins_at,
            tensor=apart[0],
        )


def _first_steps(trace: Trace) -> Iterator[tuple[int, Stepped]]:
    """Give each optimizer's first step, and its place."""
    seen = set[int]()
    for place, step in enumerate(trace.steps):
        own = step.stepped[0]
        if own.optimizer not in seen:
            seen.add(own.optimizer)
            yield place, own


def _data(case: Case, whole: Trace, begins_at: int) -> Iterator[Finding]:
    """Compare samples and random numbers."""
    first = case.comparison.differences[0]
    if (step := case.comparison.samples_differ_from) is not None:
        yield case.found(
            resume_causes.ORDER_NOT_RESTORED,
            f"it trains on other samples from step {begins_at + step} on",
            step=begins_at + step,
        )
    elif (step := case.comparison.contents_differ_from) is not None:
        yield case.found(
            resume_causes.RANDOM_NOT_RESTORED,
            "the same samples are augmented otherwise",
            step=begins_at + step,
        )
    elif first.gradients and _draws_otherwise(case, whole, begins_at):
        yield case.found(
            resume_causes.RANDOM_NOT_RESTORED,
            "what is drawn at random in a step (dropout, noise) is something else",
            step=begins_at,
        )


def _draws_otherwise(case: Case, whole: Trace, begins_at: int) -> bool:
    """Tell whether the first step's random numbers are other ones than that step's."""
    ours, theirs = (trace.by_rank_0(Drew) for trace in (whole, case.other))
    place = begins_at * round(len(ours) / len(whole.steps))  # as many in each step
    return bool(theirs) and (place >= len(ours) or ours[place].state != theirs[0].state)


def _unseen(launches: Launches, found: Sequence[Finding], begins_at: int | None) -> Iterator[str]:
    named = {finding.cause for finding in found}
    if begins_at is None or resume_causes.NOT_RESUMED in named:
        return
    if resume_causes.ORDER_NOT_RESTORED in named:
        yield "with other samples, losses, gradients and random numbers can't be compared"
    if not any(any(step.shares) for step in launches.whole.steps):
        yield "no DataLoader was used: whether the order of samples is restored isn't known"
    if any(found.is_cut for found in launches.whole.training()):
        yield (
            f"epochs were cut off after {plural(launches.cut_at, 'step')} (--steps): what comes "
            "after that isn't compared"
        )
