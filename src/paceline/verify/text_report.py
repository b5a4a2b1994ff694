"""What `paceline verify` prints: a table, what was found, what could not be seen; and as JSON.

The page of `--html` is made from this JSON alone (`report/verification.py`).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import shorten
from typing import final

from paceline.options.figures import listed, plural, show_seconds
from paceline.options.text import aligned, line_width, wrapped
from paceline.verify.compare import FACTOR, Comparison, Limits, losses_of
from paceline.verify.finding import Finding
from paceline.verify.source_lines import code_at, shown
from paceline.verify.trace import Step, Trace
from paceline.verify.verdict import CountVerdict, Verdict

_WIDTH = 100
_CONCLUSIONS = {
    Verdict.SAME_BITS: "on {on} the training is the same as on {start}, bit for bit",
    Verdict.ROUNDING: "on {on} the training is the same as on {start}, up to rounding",
    Verdict.CHANCE: "on {on} the training has the same samples as on {start}, but other random "
    "numbers, so that losses and weights could not be compared",
    Verdict.DIFFERENT: "on {on} this is another training than on {start}",
    Verdict.FAILED: "on {on} the script fails",
    Verdict.NOTHING: "on {on} no step could be compared: nothing is known of it",
}
_HEADINGS = ("workers", "steps", "samples", "loss", "gradients", "weights", "verdict")


@final
@dataclass(frozen=True, kw_only=True)
class Times:
    """What a verification took."""

    took_s: float
    launches: tuple[tuple[str, Trace], ...]
    """By name, in order."""

    def as_text(self) -> str:
        """Write it in a line."""
        starting = sum(trace.starting_s for _, trace in self.launches)
        parts = [("starting", starting)]
        parts += [(name, trace.took_s - trace.starting_s) for name, trace in self.launches]
        parts += [("comparing", self.took_s - sum(trace.took_s for _, trace in self.launches))]
        shown = ", ".join(f"{name} {show_seconds(size)}" for name, size in parts)
        return wrapped_text(f"Took {show_seconds(self.took_s)}: {shown}.", 0)

    def as_json(self) -> dict[str, object]:
        """Write it for programs."""
        launches = [
            {
                "launch": name,
                "workers": trace.workers,
                "took_s": round(trace.took_s, 3),
                "starting_s": round(trace.starting_s, 3),
            }
            for name, trace in self.launches
        ]
        return {"took_s": round(self.took_s, 3), "launches": launches}


@final
@dataclass(frozen=True, kw_only=True)
class VerifyResult:
    """All that a verification has found."""

    results: tuple[CountVerdict, ...]
    """The first is the one that the others were compared with."""
    limits: Limits
    unseen: tuple[str, ...]
    yardstick: Comparison | None = None
    """The first launch against itself, disturbed."""

    @property
    def findings(self) -> list[Finding]:
        """Give each cause once, on the first number of workers that shows it; notes last."""
        found: dict[str, Finding] = {}
        for result in self.results:
            for finding in result.findings:
                found.setdefault(finding.cause.name, finding)
        return sorted(found.values(), key=lambda finding: finding.is_note)

    @property
    def causes(self) -> list[str]:
        """Name all that is to be mended."""
        return [str(finding.cause) for finding in self.findings if not finding.is_note]

    @property
    def is_good(self) -> bool:
        """Whether the training is the same, and nothing is wrong."""
        bad = (Verdict.DIFFERENT, Verdict.FAILED, Verdict.NOTHING)
        return not self.causes and not any(result.verdict in bad for result in self.results)

    def workers_with(self, verdict: Verdict) -> list[int]:
        """List the numbers of workers that have a verdict."""
        return [result.workers for result in self.results if result.verdict == verdict]


def as_text(outcome: VerifyResult) -> str:
    """Write it for people."""
    table = "\n".join(aligned(_rows(outcome), range(len(_HEADINGS))))
    parts = [wrapped_text(headline(outcome), 0), table, wrapped_text(_meaning(outcome), 0)]
    parts += describe_found(outcome.findings, outcome.unseen, outcome.results[0].trace)
    parts.append(wrapped_text(f"Conclusion: {conclusion(outcome)}", 0))
    return "\n\n".join(part for part in parts if part)


def describe_found(findings: Sequence[Finding], unseen: Sequence[str], first: Trace) -> list[str]:
    """Write all causes, what could not be seen, and what to do next: a paragraph each."""
    causes = [finding for finding in findings if not finding.is_note]
    parts = [_describe(f"{number}. ", finding, first) for number, finding in enumerate(causes, 1)]
    parts += [_describe("Note: ", finding, first) for finding in findings if finding.is_note]
    if unseen:
        parts.append("Not seen:\n" + "\n".join(wrapped_text(f"- {u}", 2) for u in unseen))
    if causes:
        parts.append("Fix this and rerun `paceline verify`: one fault may hide another.")
    return parts


def headline(outcome: VerifyResult) -> str:
    """Give the verdict on all numbers of workers in a line: the worst of all numbers."""
    on = f"on {listed([str(result.workers) for result in outcome.results])} workers"
    causes, found = outcome.causes, {result.verdict for result in outcome.results[1:]}
    named = _counted("cause", causes)
    if failed := outcome.workers_with(Verdict.FAILED):
        if causes == ["failed"]:  # which says nothing more than the verdict
            named = shorten(outcome.findings[0].what, _WIDTH, placeholder=" ...")
        return f"failed on {plural(failed[0], 'worker')}: {named}"
    if Verdict.NOTHING in found:
        return f"nothing to compare {on}"
    if Verdict.DIFFERENT in found:
        return f"different: {named}"
    if Verdict.CHANCE in found:
        text = f"the same samples {on}, but other random numbers"
    else:
        how = "up to rounding" if Verdict.ROUNDING in found else "bit for bit"
        text = f"the same training {on}, {how}"
    return f"{text}; {_counted('fault', causes)}" if causes else text


def conclusion(outcome: VerifyResult) -> str:
    """Say in words what has come out."""
    first = outcome.results[0]
    start = plural(first.workers, "worker")
    if first.verdict == Verdict.FAILED:
        return f"the script fails on {start}, so that nothing could be compared."
    parts = []
    # A sentence for each verdict, over all numbers of workers that have it.
    for verdict, sentence in _CONCLUSIONS.items():
        if counts := outcome.workers_with(verdict):
            on = f"{listed(list(map(str, counts)))} {'worker' if counts == [1] else 'workers'}"
            parts.append(sentence.format(on=on, start=start))
    word = "cause" if outcome.workers_with(Verdict.DIFFERENT) else "fault"
    fixes = [f" To fix: {_counted(word, outcome.causes)}."] if outcome.causes else []
    return "".join([f"{'; '.join(parts)}.", *fixes])


def _counted(word: str, causes: Sequence[str]) -> str:
    return f"{plural(len(causes), word)}: {', '.join(causes)}"


def as_json(outcome: VerifyResult) -> dict[str, object]:
    """Write it for programs."""
    first, *others = outcome.results
    names = {id(result): plural(result.workers, "worker") for result in outcome.results}
    return {
        "is_good": outcome.is_good,
        "verdict": headline(outcome),
        "conclusion": conclusion(outcome),
        "table": [list(row) for row in _rows(outcome)],
        "workers": [_result_json(result) for result in outcome.results],
        "losses": [
            losses_json(names[id(first)], first.trace),
            *(losses_json(names[id(r)], r.trace, first.trace.steps) for r in others),
        ],
        "first_differences": [
            found
            for r in others
            for found in first_difference_json(names[id(r)], r.comparison, outcome.limits)
        ],
        "findings": [finding_json(finding, first.trace) for finding in outcome.findings],
        "limits": limits_json(outcome.limits) | {"meaning": _meaning(outcome)},
        "not_seen": list(outcome.unseen),
    }


def limits_json(limits: Limits) -> dict[str, object]:
    """Write how far apart two launches may be, step by step."""
    return {
        "measured": limits.measured,
        "gradients": _finite(limits.gradients),
        "weights": _finite(limits.weights),
    }


def losses_json(
    launch: str, trace: Trace, beside: Sequence[Step] = (), *, after: int = 0
) -> dict[str, object]:
    """Write a launch's losses over all ranks, step by step.

    Args:
        beside: Steps of the launch that it is compared with, from the same step on.
        after: Steps before its first one.
    """
    # Six digits are more than a chart can show.
    shown = [float(f"{loss:.6g}") for loss in losses_of(trace, beside)]
    return {"launch": launch, "from_step": after + 1, "values": _finite(shown)}


def first_difference_json(
    launch: str, compared: Comparison | None, limits: Limits
) -> list[dict[str, object]]:
    """Write the first step that isn't the same, in a list that is empty where all are."""
    found = compared.first_difference(limits) if compared else None
    if found is None:
        return []
    return [{"launch": launch, "step": found.step + 1, "in": list(found.quantities)}]


def finding_json(finding: Finding, first: Trace) -> dict[str, object]:
    """Write a cause for programs.

    Args:
        first: The first launch, whose libraries and batch count for the remedies.
    """
    return {
        "cause": str(finding.cause),
        "is_fault": not finding.is_note,
        "workers": finding.workers,
        "what": finding.what,
        "step": None if finding.step is None else finding.step + 1,
        "rank": finding.rank,
        "tensor": finding.tensor,
        "lines": [_line_json(place) for place in finding.lines],
        "why": finding.cause.why,
        "remedies": _remedies(finding, first),
    }


def _remedies(finding: Finding, first: Trace) -> dict[str, str]:
    """Say how to mend it, by what the script uses."""
    cause = finding.cause
    batch = sum(first.steps[0].shares) if first.steps else 0
    plain = "PyTorch", finding.remedy or cause.torch
    if first.in_session:
        plain = "Paceline", cause.paceline
    for library in first.libraries:
        if own := {
            "Lightning": cause.lightning,
            "Accelerate": cause.accelerate,
            "Transformers": cause.transformers,
        }[library]:
            plain = library, own
            break
    found = dict([plain, ("Paceline", cause.paceline)])
    return {name: text.replace("{batch}", str(batch or 64)) for name, text in found.items()}


def _line_json(place: str) -> dict[str, object]:
    name, _, line = place.rpartition(":")
    return {"file": name, "line": int(line), "code": code_at(place)}


def _result_json(result: CountVerdict) -> dict[str, object]:
    return {
        "workers": result.workers,
        "verdict": str(result.verdict),
        "causes": [str(finding.cause) for finding in result.findings],
        "steps": steps_json(result.comparison),
    }


def steps_json(compared: Comparison | None) -> list[dict[str, object]]:
    """Write how far apart two launches are, step by step."""
    return [
        {n: v if not isinstance(v, float) or math.isfinite(v) else None for n, v in s.items()}
        for s in (
            asdict(replace(d, step=d.step + 1)) for d in (compared.differences if compared else ())
        )
    ]


def _finite(sizes: Sequence[float]) -> list[float | None]:
    return [size if math.isfinite(size) else None for size in sizes]


def _rows(outcome: VerifyResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [_HEADINGS, *(_row(result) for result in outcome.results)]
    found = outcome.yardstick
    if found is not None:
        name = f"{found.workers}, disturbed"
        rows.append((name, str(len(found.differences)), "same", *sizes_of(found), "the yardstick"))
    return rows


def _row(result: CountVerdict) -> tuple[str, ...]:
    found, steps = result.comparison, str(len(result.trace.steps))
    if result.verdict == Verdict.NOT_RUN:
        steps = "-"
    if found is None or not found.differences:
        return (str(result.workers), steps, "-", "-", "-", "-", result.verdict)
    shown = (_samples(result), *sizes_of(found), result.verdict)
    return (str(result.workers), steps, *shown)


def sizes_of(found: Comparison) -> list[str]:
    """Write the largest differences in loss, gradients and weights."""
    worst = [found.worst(name) for name in ("loss", "gradients", "weights")]
    return ["same" if size == 0 else f"{size:.1e}" for size in worst]


def _samples(result: CountVerdict) -> str:
    found = result.comparison
    if not any(any(step.shares) for step in result.trace.steps):
        return "?"
    return "same" if found is None or found.samples_differ_from is None else "differ"


def _meaning(outcome: VerifyResult) -> str:
    """Say what sizes are, and which of them count as rounding; empty where none matters."""
    limits = outcome.limits
    compared = {Verdict.ROUNDING, Verdict.DIFFERENT}
    if compared.isdisjoint(result.verdict for result in outcome.results):
        return ""
    if not limits.measured and not any(limits.weights):
        return ""  # nothing had to be measured
    if not limits.measured:
        return f"Sizes are relative; up to {limits.weights[0]:g} counts as rounding (--tolerance)."
    growth = f"{limits.weights[0]:.1e} in the first step, {limits.weights[-1]:.1e} in the last"
    return (
        "Sizes are relative, the largest of all steps. How rounding grows in this training was "
        "measured by a launch whose weights and gradients were disturbed in their last bits; "
        f"{FACTOR:g} times as far counts as rounding (of weights: {growth})."
    )


def _describe(number: str, finding: Finding, first: Trace) -> str:
    """Write a cause with where it shows, why it matters and how it is mended."""
    places = [plural(finding.workers, "worker")]
    places += [f"from step {finding.step + 1} on"] if finding.step is not None else []
    places += [f"rank {finding.rank}"] if finding.rank is not None else []
    places += [f"first in {finding.tensor}"] if finding.tensor else []
    lines = [f"{number}{finding.cause} ({', '.join(places)})"]
    parts = [("", finding.what), *(("at ", shown(place)) for place in finding.lines)]
    parts += [("why: ", finding.cause.why)]
    parts += [(f"{name}: ", text) for name, text in _remedies(finding, first).items()]
    return "\n".join([*lines, *(wrapped_text(f"   {label}{text}", 5) for label, text in parts)])


def wrapped_text(text: str, indent: int) -> str:
    """Break lines; all but the first are indented."""
    return "\n".join(wrapped(text, line_width(_WIDTH), " " * indent))
