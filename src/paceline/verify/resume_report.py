"""What `paceline verify --resume` prints; and as JSON."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.options.figures import listed, plural
from paceline.options.text import aligned
from paceline.verify.compare import Comparison
from paceline.verify.resume import ResumeResult
from paceline.verify.text_report import (
    describe_found,
    finding_json,
    first_difference_json,
    limits_json,
    losses_json,
    sizes_of,
    steps_json,
    wrapped_text,
)
from paceline.verify.trace import Trace
from paceline.verify.verdict import Verdict

_HEADINGS = ("launch", "steps", "samples", "loss", "gradients", "weights", "verdict")


@dataclass(frozen=True)
class _Part:
    """A launch that was killed or resumed, and compared with the undisturbed one."""

    name: str
    begins_at: int
    trace: Trace
    comparison: Comparison


def resume_text(found: ResumeResult) -> str:
    """Write it for people: the verdict first."""
    table = "\n".join(aligned(_rows(found), range(len(_HEADINGS))))
    repeating = (
        f"To repeat it: --kill-at-step {found.launches.kill_at}. It was killed by SIGKILL, as a "
        "lost host is, on all its workers."
    )
    described = describe_found(found.findings, found.unseen, found.launches.whole)
    headline = wrapped_text(resume_headline(found), 0)
    return "\n\n".join([headline, table, *described, wrapped_text(repeating, 0)])


def resume_headline(found: ResumeResult) -> str:
    """Return the verdict in a line."""
    kills, begun = (listed(list(map(str, places))) for places in (_kills(found), _begun(found)))
    killed = f"killed after {kills} step{'' if kills == '1' else 's'}"
    killed += f", resumed after {begun}" if begun not in ("", "0") else ""
    faults = [str(finding.cause) for finding in found.findings if not finding.is_note]
    names = ", ".join(faults)
    if found.verdict == Verdict.FAILED:
        return f"failed when it was resumed: {killed}"
    if found.verdict == Verdict.DIFFERENT:
        return f"different: {plural(len(faults), 'cause')}: {names} ({killed})"
    if found.verdict == Verdict.NOTHING:
        return f"nothing to compare{': ' if names else ''}{names} ({killed})"
    how = {
        Verdict.SAME_BITS: "bit for bit",
        Verdict.ROUNDING: "up to rounding",
        Verdict.CHANCE: "the same samples, but other random numbers",
    }
    return f"the same training when it is {killed}: {how[found.verdict]}"


def resume_json(found: ResumeResult) -> dict[str, object]:
    """Write it for programs."""
    launches, parts = found.launches, [*_parts(found)]
    steps = launches.whole.steps
    return {
        "is_good": found.is_good,
        "verdict": resume_headline(found),
        "workers": launches.whole.workers,
        "killed_after": _kills(found),
        "resumed_after": _begun(found),
        "saved": list(launches.saved),
        "table": [list(row) for row in _rows(found)],
        "parts": [
            {
                "launch": part.name,
                "from_step": part.begins_at + 1,
                "steps": steps_json(part.comparison)[part.begins_at :],
            }
            for part in parts
        ],
        "losses": [
            losses_json("undisturbed", launches.whole),
            *(losses_json(p.name, p.trace, steps[p.begins_at :], after=p.begins_at) for p in parts),
        ],
        "first_differences": [
            difference
            for part in parts
            for difference in first_difference_json(part.name, part.comparison, found.limits)
        ],
        "findings": [finding_json(finding, launches.whole) for finding in found.findings],
        "limits": limits_json(found.limits),
        "not_seen": list(found.unseen),
    }


def _parts(found: ResumeResult) -> Iterator[_Part]:
    launches = found.launches
    yield _Part("killed", 0, launches.killed, found.before)
    for name, trace, case in zip(_names(found), launches.resumed, found.cases, strict=False):
        yield _Part(name, case.begins_at, trace, case.comparison)


def _names(found: ResumeResult) -> list[str]:
    whole, names = found.launches.whole, ("resumed", "resumed again")
    return [
        name if trace.workers == whole.workers else f"{name} on {trace.workers}"
        for name, trace in zip(names, found.launches.resumed, strict=False)
    ]


def _begun(found: ResumeResult) -> list[int]:
    return [case.begins_at for case in found.cases]


def _kills(found: ResumeResult) -> list[int]:
    launches = found.launches
    again = [begun + launches.again_at for begun in _begun(found)[:1]]
    return [launches.kill_at, *again[: len(launches.resumed) - 1]]


def _rows(found: ResumeResult) -> list[tuple[str, ...]]:
    rows = [_HEADINGS, ("undisturbed", f"1 to {len(found.launches.whole.steps)}", *"-----")]
    for part in _parts(found):
        steps = f"{part.begins_at + 1} to {part.begins_at + len(part.trace.steps)}"
        rows.append((part.name, steps, *_sizes(part.comparison), "-"))
    rows += [(name, *"------") for name in _names(found)[len(found.cases) :]]
    return [*rows[:-1], (*rows[-1][:-1], str(found.verdict))]


def _sizes(compared: Comparison) -> tuple[str, ...]:
    if not compared.differences:
        return ("-",) * 4
    samples = "same" if compared.samples_differ_from is None else "differ"
    return (samples, *sizes_of(compared))
