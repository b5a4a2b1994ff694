"""Compares a training that was killed and started again, twice, with an undisturbed one."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from paceline.options.figures import listed, plural
from paceline.verify import resume_causes as causes
from paceline.verify.causes import CHANCE, FIGURE_DIFFERS
from paceline.verify.compare import Comparison, Limits, compare
from paceline.verify.detectors import steps
from paceline.verify.detectors.figures import evaluations, paired_figures
from paceline.verify.detectors.ranks import taken
from paceline.verify.events import Drew, Evaluated, FileRead, Loaded, Scaled, Stepped, Wrote
from paceline.verify.finding import Case, Detector, Finding, Need
from paceline.verify.tensor_sketch import relative_distance
from paceline.verify.trace import Kind, Step, Trace, counted
from paceline.verify.verdict import EFFECTS, Verdict, failed, with_lines

_SHOWN = 3
_IN_STEPS = ("dropout", "step")
_CUMULATIVE = re.compile(r"(?<![a-z])best(?![a-z])", re.IGNORECASE)
"""What names a figure of all the training so far."""


@final
@dataclass(frozen=True, kw_only=True)
class Launches:
    """The launches of one command, and what is known of them."""

    whole: Trace
    """Undisturbed."""
    killed: Trace
    kill_at: int
    """Steps that the killed one took."""
    resumed: tuple[Trace, ...] = ()
    """Each goes on with what the one before has left; all but the last were killed as well."""
    saved: tuple[str, ...]
    """Files written by the first kill."""
    cut_at: int
    """Steps after which an epoch is cut off."""


@final
@dataclass(frozen=True, kw_only=True)
class ResumeResult:
    """The result of `paceline verify --resume`."""

    launches: Launches
    verdict: Verdict
    before: Comparison
    """The killed launch against the undisturbed one."""
    cases: tuple[Case, ...]
    """Those resumed launches against it that could be compared."""
    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]
    limits: Limits
    """What counts as rounding."""

    @property
    def is_good(self) -> bool:
        """Whether it is the same training."""
        return self.verdict in (Verdict.SAME_BITS, Verdict.ROUNDING, Verdict.CHANCE)


def choose_step(whole: Trace, chance: float) -> int:
    """Choose after which step to kill a training: in the second of three epochs.

    Args:
        whole: The undisturbed launch, of at least two steps.
        chance: From 0 to below 1.

    Returns:
        Steps that are taken before, fewer than all.
    """
    number = len(whole.steps)
    least = min(number - 1, number // 3 + 1)
    most = max(least, 2 * number // 3)
    return least + int(chance * (most - least + 1))


def choose_again(whole: Trace, kill_at: int) -> int:
    """Choose after how many steps of its own to kill the resumed training as well.

    It goes on one step before the first kill where it saves each step. Then this is later in the
    same epoch after an odd number of steps, and right behind the epoch's end after an even one.
    """
    end = _epoch_of(whole, kill_at - 1)[1]
    later = kill_at + (end - kill_at + 1) // 2 if kill_at % 2 and kill_at < end else end + 1
    return max(1, min(later, len(whole.steps) - 1) - kill_at + 1)


def compare_resumed(launches: Launches, limits: Limits) -> ResumeResult:
    """Find where each resumed launch begins, and what it does otherwise from there on.

    Args:
        launches: The undisturbed one took steps and didn't fail.
    """
    whole = launches.whole
    # Until the kill both launches should be the same.
    before = compare(whole, launches.killed)
    found, unseen, cases = (
        list(_not_repeatable(launches, before, limits)),
        list[str](),
        list[Case](),
    )
    # From where a resumed one goes on, too, if what came before allows to say so.
    for trace in launches.resumed:
        resumed = replace(trace, in_time=whole.without_look_ahead)
        if unseen or any(finding.makes_different for finding in found):
            break
        if resumed.failure:
            found.append(failed(resumed))
        elif not resumed.steps:
            unseen.append(_no_step(resumed))
        else:
            case = _case(launches, resumed, limits)
            cases.append(case)
            if case.begins_at == 0 and not launches.saved:
                unseen.append(
                    f"nothing was written in {plural(launches.kill_at, 'step')}, so it begins with "
                    "the first step: kill it later (--kill-at-step), or have it save earlier"
                )
            else:
                found += with_lines([*_search(case, launches)], case)
    findings = tuple({finding.cause: finding for finding in reversed(found)}.values())[::-1]
    return ResumeResult(
        launches=launches,
        verdict=_verdict(findings, unseen, launches, cases),
        before=before,
        cases=tuple(cases),
        findings=findings,
        unseen=(*unseen, *_unseen(launches, findings, cases)),
        limits=limits,
    )


def _verdict(
    found: Sequence[Finding], unseen: Sequence[str], launches: Launches, cases: Sequence[Case]
) -> Verdict:
    named = {finding.cause for finding in found}
    if any(trace.failure for trace in launches.resumed):
        return Verdict.FAILED
    if causes.NOT_REPEATABLE in named or unseen:
        return Verdict.NOTHING
    if any(finding.makes_different for finding in found):
        return Verdict.DIFFERENT
    if not any(case.comparison.differences[case.begins_at :] for case in cases):
        return Verdict.NOTHING
    if CHANCE in named:
        return Verdict.CHANCE
    same = all(case.comparison.same_bits for case in cases)
    return Verdict.SAME_BITS if same else Verdict.ROUNDING


def _not_repeatable(launches: Launches, before: Comparison, limits: Limits) -> Iterator[Finding]:
    """Compare the steps before the kill: does the command do the same twice at all?"""
    if found := before.first_difference(limits):
        step, quantities = found
        yield Finding(
            cause=causes.NOT_REPEATABLE,
            workers=launches.whole.workers,
            what=f"the same command, launched twice, has other {listed(quantities)} in "
            f"step {step + 1}",
            step=step,
        )


def _no_step(resumed: Trace) -> str:
    read = [f"it has read {event.path}" for event in resumed.by_rank_0(FileRead)[-1:]]
    return ". ".join([*read, "The resumed launch took no step: is the training over by then?"])


def _case(launches: Launches, resumed: Trace, limits: Limits) -> Case:
    """Put the steps that a resumed launch takes for done before its own."""
    whole = launches.whole
    killed_by = launches.kill_at + sum(len(trace.steps) for trace in launches.resumed[:-1])
    begins_at, apart = _beginning(whole, resumed, killed_by)
    # An epoch that was cut off goes on elsewhere.
    is_cut = any(found.is_cut for found in whole.training())
    end = (begins_at // launches.cut_at + 1) * launches.cut_at if is_cut else len(whole.steps)
    first = replace(whole, only=whole.steps[:end])
    own = _without_skipped(whole.steps[begins_at], resumed)
    other = replace(resumed, only=(*whole.steps[:begins_at], *own))
    comparison = compare(first, other)
    return Case(
        first=first,
        other=other,
        comparison=comparison,
        beyond=comparison.first_beyond(limits),
        begins_at=begins_at,
        begun_apart=apart if apart > limits.of_weights(0) else 0.0,
    )


def _beginning(whole: Trace, resumed: Trace, killed_by: int) -> tuple[int, float]:
    """Find the step whose weights the resumed launch begins with.

    Returns:
        How many steps come before, and how far the weights are from those: 0 for the same bits.
    """
    first, apart = resumed.steps[0], list[float]()
    own, all_steps = first.stepped[0], [step.stepped[0] for step in whole.steps]
    # The weights of this optimizer before each step.
    weights = next((s.before for s in all_steps if s.names == own.names), ())
    for stepped in all_steps:
        is_alike = len(weights) == len(own.before)
        pairs = zip(weights, own.before, strict=False)
        size = relative_distance(pairs) if is_alike else math.inf
        apart.append(math.inf if math.isnan(size) else size)
        weights = stepped.weights if stepped.names == own.names else weights
    least = min(apart)
    nearest = [n for n, size in enumerate(apart) if size == least]
    # Weights may stay as they are for some steps: then the samples tell.
    same = [n for n in nearest if whole.steps[n].all_samples == first.all_samples]
    by_then = [n for n in nearest if n <= killed_by]
    return (same or by_then[-1:] or nearest)[0], least


def _without_skipped(mine: Step, resumed: Trace) -> tuple[Step, ...]:
    """Leave out batches that a script only takes to get to the one where it goes on."""
    first, ranks, size = resumed.steps[0], resumed.workers, len(mine.all_samples)
    shares = mine.shares
    if len(shares) != ranks:
        shares = tuple((size + ranks - 1 - rank) // ranks for rank in range(ranks))
    trimmed = replace(
        first,
        samples=tuple(s[len(s) - n :] for s, n in zip(first.samples, shares, strict=True)),
        contents=tuple(c[len(c) - n :] for c, n in zip(first.contents, shares, strict=True)),
    )
    is_there = size and all(map(int.__ge__, first.shares, shares))
    same = trimmed.samples == mine.samples or len(mine.shares) != ranks
    is_same = is_there and same and trimmed.all_samples == mine.all_samples
    return (trimmed if is_same else first, *resumed.steps[1:])


def _search(case: Case, launches: Launches) -> Iterator[Finding]:
    """Compare everything that a checkpoint has to hold."""
    if found := _KEYS(case):
        yield from found
    elif case.begins_at == 0:
        yield case.found(
            causes.NOT_RESUMED,
            f"it was killed after {plural(launches.kill_at, 'step')} and begins with the first one "
            f"again, though it had written {listed([*launches.saved[:_SHOWN]])}",
        )
    else:
        found = [finding for detector in RESTORED for finding in detector(case)]
        # What else differs; on another number of workers it may be for them.
        is_other = case.workers != case.first.workers
        for detector in (*_BY_WORKERS, *EFFECTS) if is_other else (_UNKNOWN,):
            if not any(f.makes_different or f.cause is CHANCE for f in found):
                found += detector(case)
        yield from found


def _keys(case: Case) -> Iterator[Finding]:
    """Find weights that load_state_dict(strict=False) left as they were."""
    known = {(e.missing, e.unexpected) for e in case.first.by_rank_0(Loaded)}
    for event in case.other.by_rank_0(Loaded):
        is_start = case.begins_at == 0 or case.begun_apart
        if is_start and event.missing and (event.missing, event.unexpected) not in known:
            text = f"{_some(event.missing)} of the model aren't in what is loaded"
            text += f", which has {_some(event.unexpected)}" if event.unexpected else ""
            yield case.found(causes.KEYS_IGNORED, text, step=case.begins_at, at=event.at)
            return


def _weights(case: Case) -> Iterator[Finding]:
    """Find weights that are those of no step."""
    if case.begun_apart:
        yield case.found(
            causes.WEIGHTS_NOT_RESTORED,
            f"it begins with weights that are those of no step: nearest are those after "
            f"{plural(case.begins_at, 'step')}, {case.begun_apart:.1e} apart",
            step=case.begins_at,
        )


def _optimizers(case: Case) -> Iterator[Finding]:
    """Find what an optimizer doesn't remember in its first step of a launch."""
    last: dict[tuple[str, ...], Sequence[Stepped]] = {}
    for number, (mine, theirs) in enumerate(zip(case.first.steps, case.other.steps, strict=False)):
        own = theirs.stepped[0]
        states = {stepped.state for stepped in last.get(own.names, ())}
        # Each rank may hold a part of it, which only the same number of ranks does again.
        if len(states) > 1 and case.workers == case.first.workers:
            states = {last[own.names][0].state}
        if number and mine.stepped[0].before:  # a new one, undisturbed as well
            states = {mine.stepped[0].state_before}
        is_known = number >= case.begins_at and own.before and len(states) == 1
        if is_known and own.state_before not in states:
            yield case.found(
                causes.OPTIMIZER_NOT_RESTORED,
                f"the state of its optimizer of {_some(own.names)} isn't the one before that step",
                step=number,
            )
            return
        last[mine.stepped[0].names] = mine.stepped


def _scale(case: Case) -> Iterator[Finding]:
    """Find a loss scale that isn't the one before."""
    place = case.begins_at
    ours, others = (taken(own.get(place + 1, ())) for own in _by_step(case, Scaled))
    if ours and others and ours[0] != others[0]:
        what = f"its loss scale is {others[0]:g} instead of {ours[0]:g}"
        yield case.found(causes.SCALE_NOT_RESTORED, what, step=place)


def _buffers(case: Case) -> Iterator[Finding]:
    """Find buffers that differ after a step with the same batch and gradients."""
    place = case.begins_at
    mine, theirs = (trace.steps[place].stepped[0].buffers for trace in case.traces)
    apart = [name for name, sha in theirs.items() if mine.get(name, sha) != sha]
    for same in case.comparison.differences[place : place + 1]:
        if apart and same.same_samples and same.same_contents and not same.gradients:
            what = f"{_some(apart)} differ after the first step"
            yield case.found(causes.BUFFERS_NOT_RESTORED, what, step=place, tensor=apart[0])


def _schedule(case: Case) -> Iterator[Finding]:
    """Find learning rates that are others; do they begin with the epoch's again?"""
    mine, theirs = ([s.stepped[0].rates for s in trace.steps] for trace in case.traces)
    pairs = enumerate(zip(mine, theirs, strict=False))
    place = next((n for n, both in pairs if any(map(steps.apart, *both))), None)
    if place is None:
        return
    begins_at = case.begins_at
    start, end = _epoch_of(case.first, begins_at)
    own = theirs[begins_at:end]
    is_again = own == mine[start : start + len(own)] != mine[: len(own)] and len(set(own)) > 1
    is_again &= not case.other.steps[begins_at].stepped[0].scheduled  # the script sets them
    rates = [listed([f"{rate:g}" for rate in each[place]]) for each in (theirs, mine)]
    yield case.found(
        causes.SCHEDULE_BY_ENUMERATE if is_again else causes.SCHEDULE_NOT_RESTORED,
        f"its learning rate is {rates[0]} instead of {rates[1]}"
        + (f", and goes on as from step {start + 1} on, where the epoch began" if is_again else ""),
        step=place,
    )


def _random_of_one_rank(case: Case) -> Iterator[Finding]:
    """Find ranks that all do what a single one does in the undisturbed launch."""
    if case.workers != case.first.workers:
        return
    draws = [_draws(case, rank) for rank in range(case.workers)]
    for number in range(case.begins_at, len(case.comparison.differences)):
        mine, theirs = (trace.steps[number] for trace in case.traces)
        drawn = [tuple(both[n].get(number) for both in draws) for n in (0, 1)]
        for what, ours, others in (
            ("draw the random numbers", drawn[0], drawn[1]),
            ("have the samples", mine.samples, theirs.samples),
            ("have the loss", mine.losses, theirs.losses),
        ):
            if len({*others}) == 1 < len({*ours}) and others[0] in ours:
                text = f"all ranks {what} of rank {ours.index(others[0])} in step {number + 1}"
                yield case.found(causes.RANDOM_OF_ONE_RANK, text, step=number)
                return


def _order(case: Case) -> Iterator[Finding]:
    """Find other samples."""
    step = case.comparison.samples_differ_from
    if step is not None and not any(_random_of_one_rank(case)):
        what = f"it trains on other samples from step {step + 1} on"
        yield case.found(causes.ORDER_NOT_RESTORED, what, step=step)


def _random(case: Case) -> Iterator[Finding]:
    """Find other random numbers, of augmentation or in a step; whatever the gradients say."""
    if case.comparison.samples_differ_from is not None or any(_random_of_one_rank(case)):
        return
    if (step := case.comparison.contents_differ_from) is not None:
        what = "the same samples are augmented otherwise"
        yield case.found(causes.RANDOM_NOT_RESTORED, what, step=step)
        return
    last = len(case.comparison.differences)
    for rank in range(case.workers):
        mine, theirs = _draws(case, rank)
        apart = [n for n in theirs if n < last and theirs[n] != mine.get(n, theirs[n])]
        if apart:
            what = "what is drawn at random in a step (dropout, noise) is something else"
            yield case.found(causes.RANDOM_NOT_RESTORED, what, step=min(apart), rank=rank)
            return


def _averages(case: Case) -> Iterator[Finding]:
    """Find weights that are evaluated, that no step tells of, and that are others."""
    mine, theirs = _by_step(case, Evaluated)
    for number in sorted(mine.keys() & theirs.keys()):
        known, own = mine[number][0].weights, theirs[number][0].weights
        is_alike = number > case.begins_at and len(known) == len(own)
        if is_alike and case.comparison.same_bits and {*known} != {*own}:
            what = (
                f"the evaluation after step {number} uses weights that are others, though those "
                "that are trained are the same: an average of them?"
            )
            yield case.found(causes.NOT_SAVED, what, step=number - 1)
            return


def _figures(case: Case) -> Iterator[Finding]:
    """Find figures that differ though the weights are the same."""
    # What is printed before the first step that both take may stand apart.
    last = len(case.comparison.differences)
    both = (counted(case.first.ranks[0]), counted(case.other.ranks[0], case.begins_at))
    cut = [tuple(e for n, e in own if case.begins_at < n <= last) for own in both]
    traces = [replace(t, ranks=(c,)) for t, c in zip(case.traces, cut, strict=True)]
    own = replace(case, first=traces[0], other=traces[1])
    if not case.weights_agree:
        return
    for figure in paired_figures(own):
        if figure.differs:
            what = f"{figure.line!r} says {figure.theirs:g}, undisturbed {figure.mine:g}"
            is_best = _CUMULATIVE.search(figure.label)
            cause = causes.NOT_SAVED if is_best else FIGURE_DIFFERS
            yield case.found(cause, what, rank=0, at=figure.at).mended_by(causes.NOT_SAVED.torch)
            return
    yield from (replace(finding, cause=FIGURE_DIFFERS) for finding in evaluations(own))


_UNKNOWN = Detector(steps.unknown, (Need.BEYOND,))
_BY_WORKERS = (
    Detector(steps.batchnorm_share, (Need.BEYOND, Need.SAME_SAMPLES)),
    Detector(steps.mean_of_means, (Need.BEYOND, Need.SAME_SAMPLES, Need.PLAIN)),
)
_KEYS = Detector(_keys)
RESTORED = (
    Detector(_weights),
    Detector(_optimizers),
    Detector(_scale),
    Detector(_buffers, (Need.SAME_RANKS,)),
    Detector(_schedule),
    Detector(_random_of_one_rank, (Need.RANKS, Need.SAME_RANKS)),
    Detector(_order),
    Detector(_random, (Need.SAME_RANKS,)),
    Detector(_averages),
    Detector(_figures),
)
"""What a checkpoint has to hold."""


def _by_step(case: Case, kind: type[Kind], rank: int = 0) -> list[dict[int, list[Kind]]]:
    """Sort both launches' events of a kind by the steps taken before them."""
    found = []
    for trace, start in ((case.first, 0), (case.other, case.begins_at)):
        own = defaultdict[int, list[Kind]](list)
        for step, event in counted(trace.ranks[rank], start):
            if isinstance(event, kind):
                own[step].append(event)
        found.append(dict(own))
    return found


def _draws(case: Case, rank: int) -> list[dict[int, str]]:
    """Return both launches' random states before the first draw of a step, by step."""
    return [
        {
            n: e[0].state
            for n, drawn in own.items()
            if (e := [d for d in drawn if d.by in _IN_STEPS])
        }
        for own in _by_step(case, Drew, rank)
    ]


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return listed([*names[:_SHOWN], *([f"{more} more"] if more > 0 else [])])


def _unseen(launches: Launches, found: Sequence[Finding], cases: Sequence[Case]) -> Iterator[str]:
    named = {finding.cause for finding in found}
    if not cases or causes.NOT_RESUMED in named:
        return
    if causes.ORDER_NOT_RESTORED in named:
        yield "with other samples, losses, gradients and random numbers can't be compared"
    if not any(any(step.shares) for step in launches.whole.steps):
        yield "no DataLoader was used: whether the order of samples is restored isn't known"
    if any(found.is_cut for found in launches.whole.training()):
        yield (
            f"epochs were cut off after {plural(launches.cut_at, 'step')} (--steps): what comes "
            "after that isn't compared"
        )
    if cases[0].workers != launches.whole.workers and (own := _of_ranks(launches)):
        yield (
            f"of one rank alone, which {plural(cases[0].workers, 'worker')} can't go on with "
            f"alike: {listed(own)}"
        )


def _of_ranks(launches: Launches) -> list[str]:
    """Name what of a training's state each rank has for itself."""
    killed = launches.killed
    draws = [tuple(e.state for e in own) for own in killed.of(Drew)]
    files = [[e.path for e in own] for own in killed.of(Wrote)]
    own = sorted({path for ranks in files[1:] for path in ranks} - {*files[0]})
    buffers = [stepped.buffers for step in killed.steps[-1:] for stepped in step.stepped]
    return [
        *(["random states"] if len({*draws}) > 1 and not killed.in_session else []),
        *(["buffers"] if any(buffer != buffers[0] for buffer in buffers) else []),
        *own[:_SHOWN],
    ]


def _epoch_of(trace: Trace, number: int) -> tuple[int, int]:
    """Return the first step of the epoch that a step is in, and the one after its last."""
    keys = [next(((d.loader, d.number) for d in s.drawn[0][-1:]), None) for s in trace.steps]
    places = [n for n, key in enumerate(keys) if key == keys[number]]
    return places[0], places[-1] + 1
