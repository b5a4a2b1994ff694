"""What `paceline verify` prints: a table, what was found, what could not be seen; and as JSON.

The page of `--html` is made from this JSON alone (`report/verification.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from textwrap import shorten
from typing import final

from paceline.options.figures import listed, plural, show_seconds
from paceline.options.text import aligned, line_width, wrapped
from paceline.verify.causes import Cause
from paceline.verify.compare import FACTOR, Comparison, Limits, losses_of
from paceline.verify.finding import Finding
from paceline.verify.source_lines import code_at, shown
from paceline.verify.trace import Trace
from paceline.verify.verdict import CountVerdict, Verdict

_WIDTH = 100
_CONCLUSIONS = {
    Verdict.SAME_BITS: "on {on} the training is the same as on {start}, bit for bit",
    Verdict.ROUNDING: "on {on} the training is the same as on {start}, up to rounding",
    Verdict.CHANCE: "on {on} the training draws other random numbers than on {start}, so that "
    "losses and weights could not be compared",
    Verdict.DIFFERENT: "on {on} this is another training than on {start}",
    Verdict.FAILED: "on {on} the script fails",
    Verdict.NOTHING: "on {on} no step could be compared: nothing is known of it",
}
_HEADINGS = ("launch", "steps", "samples", "loss", "gradients", "weights", "verdict")


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
class Part:
    """A launch as it was compared with the first."""

    name: str
    trace: Trace
    comparison: Comparison | None = None
    begins_at: int = 0
    """Steps that it takes for done."""
    verdict: str = "-"
    findings: tuple[Finding, ...] = ()

    @property
    def row(self) -> tuple[str, ...]:
        """Give its row of the table."""
        steps, found = len(self.trace.steps), self.comparison
        shown = f"{self.begins_at + 1} to {self.begins_at + steps}" if self.begins_at else steps
        if found is None or not found.differences:
            return (self.name, str(shown), *"----", self.verdict)
        is_known = any(any(step.shares) for step in self.trace.steps)
        samples = "same" if found.samples_differ_from is None else "differ"
        worst = [found.worst(name) for name in ("loss", "gradients", "weights")]
        sizes = ("same" if size == 0 else f"{size:.1e}" for size in worst)
        return (self.name, str(shown), samples if is_known else "?", *sizes, self.verdict)

    def as_json(self) -> dict[str, object]:
        """Write it for programs."""
        differences = self.comparison.differences if self.comparison else ()
        return {
            "launch": self.name,
            "workers": self.trace.workers,
            "verdict": self.verdict,
            "causes": [str(finding.cause) for finding in self.findings],
            "from_step": self.begins_at + 1,
            "steps": [
                {n: _finite(v) for n, v in asdict(replace(d, step=d.step + 1)).items()}
                for d in differences[self.begins_at :]
            ],
        }


@final
@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a verification has found."""

    headline: str
    parts: tuple[Part, ...]
    """The first is the one that the others were compared with."""
    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]
    limits: Limits
    closing: str
    is_good: bool
    meaning: str = ""
    """What sizes are; empty where none matters."""
    yardstick: Part | None = None
    """The first launch once more, disturbed."""
    more: Mapping[str, object] = field(default_factory=dict)
    """For programs alone."""

    def as_text(self) -> str:
        """Write it for people."""
        table = "\n".join(aligned(self._rows(), range(len(_HEADINGS))))
        causes = [finding for finding in self.findings if not finding.is_note]
        notes = [finding for finding in self.findings if finding.is_note]
        parts = [wrapped_text(self.headline, 0), table, wrapped_text(self.meaning, 0)]
        parts += [self._describe(f"{number}. ", each) for number, each in enumerate(causes, 1)]
        parts += [self._describe("Note: ", finding) for finding in notes]
        if self.unseen:
            parts.append(
                "\n".join(["Not seen:", *(wrapped_text(f"- {u}", 2) for u in self.unseen)])
            )
        if causes:
            parts.append("Fix this and rerun `paceline verify`: one fault may hide another.")
        return "\n\n".join(filter(None, [*parts, wrapped_text(self.closing, 0)]))

    def as_json(self) -> dict[str, object]:
        """Write it for programs."""
        first, *others = self.parts
        steps, limits = first.trace.steps, self.limits
        differences = [
            (part.name, found)
            for part in others
            if part.comparison and (found := part.comparison.first_difference(limits))
        ]
        return {
            "is_good": self.is_good,
            "verdict": self.headline,
            "conclusion": self.closing,
            "table": [list(row) for row in self._rows()],
            "compared": [part.as_json() for part in self.parts],
            "losses": [
                {
                    "launch": part.name,
                    "from_step": part.begins_at + 1,
                    # Six digits are more than a chart can show.
                    "values": [
                        _finite(float(f"{loss:.6g}"))
                        for loss in losses_of(part.trace, steps[part.begins_at :])
                    ],
                }
                for part in self.parts
            ],
            "first_differences": [
                {"launch": name, "step": step + 1, "in": quantities}
                for name, (step, quantities) in differences
            ],
            "findings": [self._finding_json(finding) for finding in self.findings],
            "limits": {
                "measured": limits.measured,
                "gradients": [_finite(size) for size in limits.gradients],
                "weights": [_finite(size) for size in limits.weights],
                "meaning": self.meaning,
            },
            "not_seen": list(self.unseen),
            **self.more,
        }

    def _rows(self) -> list[tuple[str, ...]]:
        yardstick = [self.yardstick.row] if self.yardstick else []
        return [_HEADINGS, *(part.row for part in self.parts), *yardstick]

    def _describe(self, number: str, finding: Finding) -> str:
        """Write a cause with where it shows, why it matters and how it is mended."""
        places = [plural(finding.workers, "worker")]
        places += [f"from step {finding.step + 1} on"] if finding.step is not None else []
        places += [f"rank {finding.rank}"] if finding.rank is not None else []
        places += [f"first in {finding.tensor}"] if finding.tensor else []
        parts = [("", finding.what), *(("at ", shown(place)) for place in finding.lines)]
        parts += [("why: ", finding.cause.why)]
        parts += [(f"{name}: ", text) for name, text in self._remedies(finding).items()]
        lines = (wrapped_text(f"   {label}{text}", 5) for label, text in parts)
        return "\n".join([f"{number}{finding.cause} ({', '.join(places)})", *lines])

    def _finding_json(self, finding: Finding) -> dict[str, object]:
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
            "remedies": self._remedies(finding),
        }

    def _remedies(self, finding: Finding) -> dict[str, str]:
        """Say how to mend it, by what the script uses."""
        cause, first = finding.cause, self.parts[0].trace
        batch = sum(first.steps[0].shares) if first.steps else 0
        own = {
            "Lightning": cause.lightning,
            "Accelerate": cause.accelerate,
            "Transformers": cause.transformers,
        }
        known = [(name, own[name]) for name in first.libraries if own[name]]
        plain = [] if first.in_session else [("PyTorch", finding.remedy or cause.torch)]
        found = dict([*(known or plain)[:1], ("Paceline", cause.paceline)])
        return {name: text.replace("{batch}", str(batch or 64)) for name, text in found.items()}


def counts_report(
    results: Sequence[CountVerdict],
    limits: Limits,
    unseen: Sequence[str],
    yardstick: Part | None = None,
) -> Report:
    """Put together what was found on all numbers of workers.

    Args:
        results: The first is the one that the others were compared with.
    """
    # Each cause once, on the first number of workers that shows it; notes last.
    found: dict[Cause, Finding] = {}
    for finding in (finding for result in results for finding in result.findings):
        found.setdefault(finding.cause, finding)
    findings = sorted(found.values(), key=lambda finding: finding.is_note)
    faults = [str(finding.cause) for finding in findings if not finding.is_note]
    bad = (Verdict.DIFFERENT, Verdict.FAILED, Verdict.NOTHING)
    parts = tuple(
        Part(
            name=plural(result.workers, "worker"),
            trace=result.trace,
            comparison=result.comparison,
            verdict=str(result.verdict),
            findings=result.findings,
        )
        for result in results
    )
    return Report(
        headline=_headline(results, findings, faults),
        parts=parts,
        findings=tuple(findings),
        unseen=tuple(unseen),
        limits=limits,
        closing=f"Conclusion: {_conclusion(results, faults)}",
        is_good=not faults and not any(result.verdict in bad for result in results),
        meaning=_meaning(results, limits),
        yardstick=yardstick,
    )


def _headline(
    results: Sequence[CountVerdict], findings: Sequence[Finding], faults: Sequence[str]
) -> str:
    """Give the verdict on all numbers of workers in a line: the worst of all numbers."""
    on = f"on {listed([str(result.workers) for result in results])} workers"
    found, named = {result.verdict for result in results[1:]}, _counted("cause", faults)
    if failed := _workers_with(results, Verdict.FAILED):
        if faults == ["failed"]:  # which says nothing more than the verdict
            named = shorten(findings[0].what, _WIDTH, placeholder=" ...")
        return f"failed on {plural(failed[0], 'worker')}: {named}"
    if Verdict.NOTHING in found:
        return f"nothing to compare {on}"
    if Verdict.DIFFERENT in found:
        return f"different: {named}"
    if Verdict.CHANCE in found:
        is_known = any(any(step.shares) for step in results[0].trace.steps)
        text = f"the same samples {on}, but other random numbers"
        text = text if is_known else f"other random numbers {on}: nothing else could be compared"
    else:
        how = "up to rounding" if Verdict.ROUNDING in found else "bit for bit"
        text = f"the same training {on}, {how}"
    return f"{text}; {_counted('fault', faults)}" if faults else text


def _conclusion(results: Sequence[CountVerdict], faults: Sequence[str]) -> str:
    """Say in words what has come out."""
    start = plural(results[0].workers, "worker")
    if results[0].verdict == Verdict.FAILED:
        return f"the script fails on {start}, so that nothing could be compared."
    parts = []
    # A sentence for each verdict, over all numbers of workers that have it.
    for verdict, sentence in _CONCLUSIONS.items():
        if counts := _workers_with(results, verdict):
            on = f"{listed(list(map(str, counts)))} {'worker' if counts == [1] else 'workers'}"
            parts.append(sentence.format(on=on, start=start))
    word = "cause" if _workers_with(results, Verdict.DIFFERENT) else "fault"
    fixes = [f" To fix: {_counted(word, faults)}."] if faults else []
    return "".join([f"{'; '.join(parts)}.", *fixes])


def _workers_with(results: Sequence[CountVerdict], verdict: Verdict) -> list[int]:
    return [result.workers for result in results if result.verdict == verdict]


def _counted(word: str, causes: Sequence[str]) -> str:
    return f"{plural(len(causes), word)}: {', '.join(causes)}"


def _line_json(place: str) -> dict[str, object]:
    name, _, line = place.rpartition(":")
    return {"file": name, "line": int(line), "code": code_at(place)}


def _finite(value: object) -> object:
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _meaning(results: Sequence[CountVerdict], limits: Limits) -> str:
    """Say what sizes are, and which of them count as rounding; empty where none matters."""
    compared = {Verdict.ROUNDING, Verdict.DIFFERENT}
    if compared.isdisjoint(result.verdict for result in results):
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


def wrapped_text(text: str, indent: int) -> str:
    """Break lines; all but the first are indented."""
    return "\n".join(wrapped(text, line_width(_WIDTH), " " * indent))
