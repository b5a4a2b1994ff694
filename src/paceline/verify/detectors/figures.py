"""Faults in the figures that a script prints, or that a session's evaluation gives."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.verify import causes
from paceline.verify.events import Drawn, Figured, PassEnded, Printed, Reduced
from paceline.verify.finding import Case, Finding
from paceline.verify.trace import Trace

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|nan|inf)(?![\w.]*\d)(?!\w*[a-z])", re.IGNORECASE
)
_PLACE = "\0"
"""Stands for a number in a line's words."""
_METRIC = re.compile(
    r"(?<![a-z])(acc(uracy)?|right|correct|errors?|score|f1|auc|m?iou|map|mrr|rmse|mse|mae|val(id\w*)?"
    r"|eval(uation)?|test|perplexity|ppl|top|metric)(?![a-z])",
    re.IGNORECASE,
)
_SPEED = re.compile(
    r"time|speed|elapsed|throughput|memory|(?<![a-z])(secs?|seconds?|ms|dt|eta|fps|tps|mem)(?![a-z])|/s\b",
    re.IGNORECASE,
)
_SPEED_UNIT = re.compile(
    r"\s*(s|sec|ms|min|seconds?|[kmg]i?b|it/s|s/it|\w+\s*(/|per)\s*s\w*)\b", re.IGNORECASE
)
"""Before and after figures that differ between any two launches."""
_EXACT = 1e-4
_APART = 1e-3
"""Relative difference of a printed figure that rounding doesn't explain."""


@dataclass(frozen=True)
class Figure:
    """A number of a line that both launches have printed."""

    line: str
    """Of the other launch."""
    at: str
    """The script's line that has printed it."""
    mine: float
    theirs: float
    precision: float
    """Of the printed digits: half of the last one's unit, the coarser of the two."""
    label: str
    """The words about it."""
    is_metric: bool
    is_combined: bool
    """Whether it is made of what the script has combined over the ranks."""
    operations: str
    """How the script has combined something since its last batch; empty where it hasn't."""

    @property
    def is_exact(self) -> bool:
        """Whether it has so many digits that no other number is near by chance."""
        return self.precision <= _EXACT * abs(self.theirs)

    @property
    def differs(self) -> bool:
        """Whether the two are further apart than rounding takes them."""
        if not (math.isfinite(self.mine) and math.isfinite(self.theirs)):
            return str(self.mine) != str(self.theirs)
        return abs(self.mine - self.theirs) > 4 * self.precision + _APART * abs(self.mine)

    def is_off_by(self, factor: float) -> bool:
        """Tell whether the other figure is this many times the first one."""
        # Both are rounded as printed; multiplying by the factor multiplies that too.
        slack = self.precision * (1 + max(factor, 1))
        is_apart = abs(self.mine - self.theirs) > 4 * slack
        return is_apart and abs(self.mine * factor - self.theirs) <= slack


def figures(case: Case) -> Iterator[Finding]:
    """Find figures that the workers' number changes."""
    if case.other.in_session:
        yield from evaluations(case)
        return
    found = [figure for figure in paired_figures(case) if figure.differs]
    if any(e.is_cut for trace in case.traces for e in trace.evaluations()):
        found = []  # after as many batches of every rank, more samples then on more ranks
    # What was combined over the ranks first: only there is a fault certain.
    for figure in sorted(found, key=lambda figure: not figure.is_combined):
        if explained := _explain(case, figure):
            yield explained
            return


def _explain(case: Case, figure: Figure) -> Finding | None:
    """Find why a figure differs; None where it may, since weights do."""
    text = f"{figure.line!r} says {figure.theirs:g}, on {case.first_workers} {figure.mine:g}"
    factor = next((f for f in (1 / case.ratio, case.ratio) if figure.is_off_by(f)), None)
    cause, why = causes.FIGURE_DIFFERS, ""
    sizes = _unequal_shares(case)
    if figure.is_combined and figure.is_metric and factor is not None:
        size = f"{case.ratio:g} times too {'small' if factor < 1 else 'large'}"
        cause, why = causes.METRIC_FACTOR, f", {size}{figure.operations}"
    elif not case.weights_agree:
        return None
    elif figure.is_combined and len(set(sizes)) > 1:
        shown = " + ".join(map(str, sizes))
        why = f": the means of unequal shares ({shown}) count alike{figure.operations}"
        cause = causes.METRIC_MEANS
    elif figure.is_combined:
        cause, why = causes.METRIC_APART, f", with the same weights{figure.operations}"
        counts = [sum(map(len, e.samples)) for t in case.traces for e in t.evaluations()[:1]]
        if len(set(counts)) > 1:
            why += f". The evaluation has {counts[1]} samples, there {counts[0]}"
    elif sizes and not figure.operations and figure.is_metric:
        cause = causes.METRIC_SHARE
        why = f": it is counted on rank 0's {sizes[0]} of {sum(sizes)} samples alone"
    return case.found(cause, text + why, rank=0, at=figure.at)


def evaluations(case: Case) -> Iterator[Finding]:
    """Compare the evaluations of a session, whose weights are the same."""
    pairs = zip(*(trace.by_rank_0(Figured) for trace in case.traces), strict=False)
    for mine, theirs in pairs if case.weights_agree else ():
        for name, value in mine.figures.items():
            other = theirs.figures.get(name, math.nan)
            if not abs(other - value) <= _APART * max(abs(value), 1 / max(mine.samples, 1)):
                what = f"an evaluation gives {name} {other:g} instead of {value:g}"
                yield case.found(causes.METRIC_APART, what)
                return


def drops_repeats(case: Case) -> bool:
    """Tell whether a script leaves out of its figures what its sampler has repeated."""
    places = case.other.places
    metrics = [f for f in paired_figures(case) if f.is_metric and f.precision]
    agree = bool(metrics) and not any(figure.differs for figure in metrics)
    return "gathered for metrics" in places or ("gathered" in places and agree)


def _unequal_shares(case: Case) -> list[int]:
    """Give the ranks' shares of an evaluation that is shared out; empty where none is."""
    for found in case.other.evaluations():
        if found.is_whole and all(found.samples) and len(set(found.samples)) > 1:
            is_once = max(found.counts.values()) == 1
            return [len(share) for share in found.samples] if is_once else []
    return []


def paired_figures(case: Case) -> Iterator[Figure]:
    """Pair the numbers in lines that have the same words, in order."""
    mine, theirs = (_by_words(trace) for trace in case.traces)
    # Lines with the same words and other numbers belong together: the n-th of each.
    for words, lines in theirs.items():
        pairs = list(zip(mine.get(words, ()), lines, strict=False))
        for place in range(words.count(_PLACE)):
            label, unit = _label(words, place)
            if _SPEED.search(label) or _SPEED_UNIT.match(unit):
                continue
            found = [_figure(case, ours, line, place, label) for ours, line in pairs]
            # By chance one may be near to a sum, but not all of them.
            is_combined = len(found) > 1 or any(f.is_exact for f in found)
            is_combined = is_combined and all(figure.is_combined for figure in found)
            is_metric = _METRIC.search(label) is not None
            for figure in found:  # whole numbers are counters, unless they were combined
                if figure.precision or (is_combined and is_metric):
                    yield replace(figure, is_metric=is_metric, is_combined=is_combined)


def _figure(case: Case, ours: "_Line", line: "_Line", place: int, label: str) -> Figure:
    one, two = (_NUMBER.findall(each.printed.line)[place] for each in (ours, line))
    precision = max(_precision(one), _precision(two))
    names = sorted({event.operation for event in line.reduced})
    return Figure(
        line=line.printed.line.strip(),
        at=line.printed.at,
        mine=float(one),
        theirs=float(two),
        precision=precision,
        label=label,
        is_metric=False,
        is_combined=any(
            abs(x - float(two)) <= 2 * precision for x in _sums(case, line.reduced, precision)
        ),
        operations=f". The script combines figures by all_reduce({', '.join(names)})" * bool(names),
    )


def _label(words: str, place: int) -> tuple[str, str]:
    """Give the words before a number, or those after it where none are; and those after it."""
    parts = words.split(_PLACE)
    before, after = parts[place], parts[place + 1]
    return (before if any(map(str.isalpha, before)) else after), after


def _sums(case: Case, reduced: Sequence[Reduced], precision: float) -> Iterator[float]:
    """Give what may be printed of sums over ranks: themselves, ratios, means, and their roots."""
    sizes = {1}
    for judged in case.other.evaluations():
        sizes |= {len(judged.samples[0]), sum(map(len, judged.samples))}
        sizes |= {judged.batches[0], sum(judged.batches)}
    for event in reduced:
        yield from event.after
        pairs = (a / b for a in event.after for b in event.after if b and a is not b)
        for value in (*event.after, *pairs) if precision else ():
            means = [value / n / ranks for n in sizes if n for ranks in (1, case.workers)]
            yield from (x * f for x in means for f in (1, 100))
            yield from (math.sqrt(x) for x in means if x > 0)


@dataclass(frozen=True)
class _Line:
    """A printed line, with what was combined since the last batch that isn't trained on."""

    printed: Printed
    reduced: tuple[Reduced, ...]


def _by_words(trace: Trace) -> dict[str, list[_Line]]:
    found = defaultdict(list)
    reduced, trains = list[Reduced](), False
    for event in trace.ranks[0]:
        if isinstance(event, Drawn):
            reduced, trains = [], trace.trains(event)
        elif isinstance(event, PassEnded):
            trains = False
        elif isinstance(event, Reduced) and event.operation in ("SUM", "AVG") and not trains:
            reduced.append(event)
        elif isinstance(event, Printed):
            line = _Line(printed=event, reduced=tuple(reduced))
            found[_NUMBER.sub(_PLACE, event.line)].append(line)
    return found


def _precision(number: str) -> float:
    """Give half a unit of the last digit; none for whole numbers, which are exact."""
    if not number[-1].isdigit():
        return math.inf  # nan and inf
    digits, _, exponent = number.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    if not decimals and not exponent:
        return 0.0
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)
