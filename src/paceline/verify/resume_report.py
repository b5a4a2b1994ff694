"""What `paceline verify --resume` has found, as a report."""

from dataclasses import replace
from itertools import zip_longest

from paceline.options.figures import listed, plural
from paceline.verify.resume import ResumeResult
from paceline.verify.text_report import Part, Report
from paceline.verify.verdict import Verdict

_HOW = {
    Verdict.SAME_BITS: "bit for bit",
    Verdict.ROUNDING: "up to rounding",
    Verdict.CHANCE: "the same samples, but other random numbers",
}


def resume_report(found: ResumeResult) -> Report:
    """Put together what was found of all launches."""
    launches = found.launches
    begun = [case.begins_at for case in found.cases]
    again = zip(begun, launches.resumed[:-1], strict=False)
    kills = [launches.kill_at, *(n + len(trace.steps) for n, trace in again)]
    parts = [
        Part(name="undisturbed", trace=launches.whole),
        Part(name="killed", trace=launches.killed, comparison=found.before),
    ]
    resumed = zip_longest(launches.resumed, found.cases)
    for name, (trace, case) in zip(("resumed", "resumed again"), resumed, strict=False):
        other = "" if trace.workers == launches.whole.workers else f" on {trace.workers}"
        parts.append(
            Part(
                name=f"{name}{other}",
                trace=trace,
                comparison=case.comparison if case else None,
                begins_at=case.begins_at if case else 0,
            )
        )
    parts[-1] = replace(parts[-1], verdict=str(found.verdict))
    return Report(
        headline=_headline(found, kills, begun),
        parts=tuple(parts),
        findings=found.findings,
        unseen=found.unseen,
        limits=found.limits,
        closing=f"To repeat it: --kill-at-step {launches.kill_at}. It was killed by SIGKILL, as a "
        "lost host is, on all its workers.",
        is_good=found.is_good,
        more={"killed_after": kills, "resumed_after": begun, "saved": list(launches.saved)},
    )


def _headline(found: ResumeResult, kills: list[int], begun: list[int]) -> str:
    """Return the verdict in a line."""
    places, resumed = (listed(list(map(str, each))) for each in (kills, begun))
    killed = f"killed after {places} step{'' if places == '1' else 's'}"
    killed += f", resumed after {resumed}" if resumed not in ("", "0") else ""
    faults = [str(finding.cause) for finding in found.findings if not finding.is_note]
    names = ", ".join(faults)
    if found.verdict == Verdict.FAILED:
        return f"failed when it was resumed: {killed}"
    if found.verdict == Verdict.DIFFERENT:
        return f"different: {plural(len(faults), 'cause')}: {names} ({killed})"
    if found.verdict == Verdict.NOTHING:
        return f"nothing to compare{': ' if names else ''}{names} ({killed})"
    return f"the same training when it is {killed}: {_HOW[found.verdict]}"
