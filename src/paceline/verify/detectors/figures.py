"""Faults in the figures that a script prints."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.options.figures import plural
from paceline.verify.events import Reduced
from paceline.verify.finding import Case, Cause, Finding

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.]*\d)")
_METRIC = re.compile(
    r"acc|right|correct|error|score|f1|auc|val|eval|test|perplex|top|metric", re.IGNORECASE
)
_SPEED = re.compile(r"time|second|speed|elapsed|throughput|memory", re.IGNORECASE)
_SPEED_UNIT = re.compile(r"\s*(s|sec|ms|min|seconds?|\w+\s*(/|per)\s*s\w*)\b", re.IGNORECASE)
"""Before and after figures that differ between any two launches."""
_CLOSE = 1e-4
"""Weights within which figures are to be the same."""
_APART = 1e-3
"""Relative difference of a printed figure that rounding doesn't explain."""


@dataclass(frozen=True)
class _Printed:
    """A number of a line that both launches have printed."""

    line: str
    """Of the other launch."""
    at: str
    """The script's line that has printed it."""
    mine: float
    theirs: float
    precision: float
    """Of the printed digits: half of the last one's unit, the coarser of the two."""
    is_metric: bool


def metrics(case: Case) -> Iterator[Finding]:
    """Find printed figures that the workers' number changes: by a factor, or as a mean of means."""
    traces = (case.first, case.other)
    if any(found.is_cut for trace in traces for found in trace.evaluations()):
        return  # after as many batches of every rank, more samples then on more ranks
    by_factor = list(_metric_factor(case))
    yield from by_factor or _metric_means(case)


def _metric_factor(case: Case) -> Iterator[Finding]:
    ratio = case.workers / case.first.workers
    for printed in _pairs(case):
        for factor, size in ((1 / ratio, "too small"), (ratio, "too large")):
            # Both numbers are rounded as printed; multiplying by the factor multiplies that too.
            slack = printed.precision * (1 + max(factor, 1))
            is_exact = abs(printed.mine * factor - printed.theirs) <= slack
            apart = abs(printed.mine - printed.theirs) > 4 * slack
            if printed.is_metric and is_exact and apart:
                times = f"{ratio:g} times {size}"
                what = (
                    f"the figure {printed.theirs:g} in {printed.line!r} is {times}: on "
                    f"{_count(case)} it is {printed.mine:g}. {_reductions(case)}"
                )
                yield case.found(Cause.METRIC_FACTOR, what.strip(), rank=0, at=printed.at)
                return


def _metric_means(case: Case) -> Iterator[Finding]:
    # Only evaluations whose samples are shared out between the ranks can show it.
    shared = [
        e
        for e in case.other.evaluations()
        if e.is_whole and all(e.samples) and len(set(e.samples)) > 1
    ]
    # With other weights, or samples counted twice, the figure differs for another reason.
    if not shared or not _weights_agree(case) or max(shared[0].counts.values(), default=0) > 1:
        return
    # The first printed metric that is apart by more than its printed digits allow.
    sizes = [len(share) for share in shared[0].samples]
    for printed in _pairs(case):
        apart = abs(printed.mine - printed.theirs)
        if not printed.is_metric or apart <= 4 * printed.precision + _APART * abs(printed.mine):
            continue
        text = f"{printed.line!r} says {printed.theirs:g}, on {_count(case)} {printed.mine:g}"
        if not case.other.reduced:
            what = f"{text}: it is counted on rank 0's {sizes[0]} of {sum(sizes)} samples alone"
            yield case.found(Cause.METRIC_SHARE, what, rank=0, at=printed.at)
        elif len(set(sizes)) > 1:
            shown = " + ".join(map(str, sizes))
            what = f"{text}: the means of unequal shares ({shown}) count alike. {_reductions(case)}"
            yield case.found(Cause.METRIC_MEANS, what.strip(), rank=0, at=printed.at)
        elif _is_combined(printed, case.other.reduced):
            what = f"{text}, with the same weights and samples. {_reductions(case)}"
            yield case.found(Cause.METRIC_APART, what.strip(), rank=0, at=printed.at)
        return


def _is_combined(printed: _Printed, reduced: Sequence[Reduced]) -> bool:
    """Tell whether a figure is made of what the script has combined: a total, or a ratio of two."""
    for event in reduced:
        ratios = [a / b for a in event.after for b in event.after if b and a is not b]
        for value in (*event.after, *ratios):
            if any(abs(f * value - printed.theirs) <= 2 * printed.precision for f in (1, 100)):
                return True
    return False


def figures(case: Case) -> Iterator[Finding]:
    """Find evaluations of a session that give other figures, with weights that are the same."""
    if not _weights_agree(case):
        return
    for mine, theirs in zip(case.first.figured, case.other.figured, strict=False):
        for name, value in mine.figures.items():
            other = theirs.figures.get(name, math.nan)
            if not abs(other - value) <= _APART * max(abs(value), 1 / max(mine.samples, 1)):
                what = f"an evaluation gives {name} {other:g} instead of {value:g}"
                yield case.found(Cause.FIGURES, what)
                return


def metrics_agree(case: Case) -> bool:
    """Tell whether metrics were printed, all with the same digits or nearly so."""
    pairs = [p for p in _pairs(case) if p.is_metric and p.precision]
    return bool(pairs) and all(abs(p.mine - p.theirs) <= 4 * p.precision for p in pairs)


def _weights_agree(case: Case) -> bool:
    """Tell whether figures can be compared: weights that are far apart give others anyway."""
    return case.beyond is None and case.comparison.worst("weights") < _CLOSE


def _count(case: Case) -> str:
    return plural(case.first.workers, "worker")


def _reductions(case: Case) -> str:
    names = sorted({reduced.operation for reduced in case.other.reduced})
    return f"The script combines figures by all_reduce({', '.join(names)})." if names else ""


def _pairs(case: Case) -> Iterator[_Printed]:
    """Pair the numbers in lines that have the same words, in order."""
    if case.other.in_session:
        return
    mine, theirs = _by_words(case.first.printed), _by_words(case.other.printed)
    places = dict(zip(case.other.printed, case.other.printed_at, strict=False))
    # Lines with the same words and other numbers belong together: the n-th of each.
    for words, lines in theirs.items():
        for ours, line in zip(mine.get(words, ()), lines, strict=False):
            pairs = zip(_NUMBER.findall(ours), _NUMBER.findall(line), strict=False)
            for place, (one, two) in enumerate(pairs):
                yield _Printed(
                    line=line.strip(),
                    at=places.get(line, ""),
                    mine=float(one),
                    theirs=float(two),
                    precision=max(_precision(one), _precision(two)),
                    is_metric=_is_metric(words, place),
                )


def _is_metric(words: str, place: int) -> bool:
    """Tell by the words before a number whether it is a metric; by those after where none are."""
    parts = words.split("#")
    label = parts[place] if any(map(str.isalpha, parts[place])) else parts[place + 1]
    is_speed = _SPEED.search(label) or _SPEED_UNIT.match(parts[place + 1])
    return _METRIC.search(label) is not None and not is_speed


def _by_words(lines: Sequence[str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for line in lines:
        found[_NUMBER.sub("#", line)].append(line)
    return found


def _precision(number: str) -> float:
    """Give half a unit of the last digit; none for whole numbers, which are exact."""
    digits, _, exponent = number.lower().partition("e")
    decimals = len(digits.partition(".")[2])
    if not decimals and not exponent:
        return 0.0
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)
