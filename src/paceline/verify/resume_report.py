"""What `paceline verify --resume` prints; and as JSON."""

from paceline.options.figures import plural
from paceline.options.text import aligned
from paceline.verify import resume_causes
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
from paceline.verify.verdict import Verdict

_HEADINGS = ("launch", "steps", "samples", "loss", "gradients", "weights", "verdict")


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
    """Give the verdict in a line."""
    killed = f"killed after {plural(found.launches.kill_at, 'step')}"
    if found.begins_at is not None and not _began_anew(found):
        killed += f", resumed after {found.begins_at}"
    causes = ", ".join(str(finding.cause) for finding in found.findings)
    number = plural(len(found.findings), "cause")
    if found.verdict == Verdict.FAILED:
        return f"failed when it was resumed: {killed}"
    if found.verdict == Verdict.DIFFERENT:
        return f"different: {number}: {causes} ({killed})"
    if found.verdict == Verdict.NOTHING:
        return f"nothing to compare{': ' if causes else ''}{causes} ({killed})"
    how = "bit for bit" if found.verdict == Verdict.SAME_BITS else "up to rounding"
    return f"the same training when it is {killed}: {how}"


def resume_json(found: ResumeResult) -> dict[str, object]:
    """Write it for programs."""
    launches, begins_at = found.launches, found.begins_at or 0
    rest, is_compared = launches.whole.steps[begins_at:], found.after is not None
    return {
        "is_good": found.is_good,
        "verdict": resume_headline(found),
        "workers": launches.whole.workers,
        "killed_after": launches.kill_at,
        "resumed_after": found.begins_at,
        "saved": list(launches.saved),
        "table": [list(row) for row in _rows(found)],
        "steps_before": steps_json(found.before),
        "steps_after": steps_json(found.after),
        "losses": [
            losses_json("undisturbed", launches.whole),
            losses_json("killed", launches.killed, launches.whole.steps),
            # Where its steps belong is known only once it has been compared.
            *([losses_json("resumed", launches.resumed, rest, after=begins_at)] * is_compared),
        ],
        "first_differences": [
            *first_difference_json("killed", found.before, found.limits),
            *first_difference_json("resumed", found.after, found.limits, after=begins_at),
        ],
        "findings": [finding_json(finding, launches.whole) for finding in found.findings],
        "limits": limits_json(found.limits),
        "not_seen": list(found.unseen),
    }


def _began_anew(found: ResumeResult) -> bool:
    return found.begins_at == 0 or any(f.cause is resume_causes.NOT_RESUMED for f in found.findings)


def _rows(found: ResumeResult) -> list[tuple[str, ...]]:
    whole, resumed = found.launches.whole, found.launches.resumed
    begins_at = found.begins_at or 0
    last = begins_at + len(resumed.steps)
    return [
        _HEADINGS,
        ("undisturbed", f"1 to {len(whole.steps)}", "-", "-", "-", "-", "-"),
        ("killed", f"1 to {found.launches.kill_at}", *_sizes(found.before), "-"),
        (
            "resumed",
            f"{begins_at + 1} to {last}" if found.after else "-",
            *_sizes(found.after),
            str(found.verdict),
        ),
    ]


def _sizes(compared: Comparison | None) -> tuple[str, ...]:
    if compared is None or not compared.differences:
        return ("-",) * 4
    samples = "same" if compared.samples_differ_from is None else "differ"
    return (samples, *sizes_of(compared))
