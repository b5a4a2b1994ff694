"""What `paceline doctor` prints: findings by host, between hosts, then a table of the links."""

from collections.abc import Iterator, Sequence

from paceline.doctor.bandwidth import HostLink, slow_links
from paceline.doctor.check_result import ORDER, CheckResult, folded
from paceline.doctor.diagnosis import Diagnosis
from paceline.options.figures import plural, show_bandwidth, show_milliseconds, show_time
from paceline.options.text import wrapped

_WIDTH = 80
_STATE, _WHAT = 9, 15
_MAX_COLUMNS, _CELL = 8, 9
_LISTED = 12
_NAMED = 3


def as_text(diagnosis: Diagnosis) -> str:
    """Write it for people, at most 80 columns wide."""
    parts = [*_sections(diagnosis), _ways(diagnosis), _summary(diagnosis)]
    return "\n\n".join(part for part in parts if part)


def _sections(diagnosis: Diagnosis) -> Iterator[str]:
    """Write the findings: first what concerns all hosts, then each host, then several of them."""
    everybody = diagnosis.hosts
    common = {finding.text for finding in diagnosis.findings if len(finding.hosts) > 1}
    groups: dict[str, list[CheckResult]] = {name: [] for name in ("", *everybody, "several hosts")}
    for finding in folded(diagnosis.findings):
        groups[_group_of(finding, everybody)].append(finding)
    for name, listed in groups.items():
        if listed:
            ordered = sorted(listed, key=lambda finding: ORDER.index(finding.state))
            lines = [
                line
                for finding in ordered
                for line in _lines(
                    finding, "" if finding.text in common else _whom(finding, everybody)
                )
            ]
            title = name or plural(len(everybody), "host")
            yield "\n".join([title, *lines])


def _group_of(finding: CheckResult, everybody: Sequence[str]) -> str:
    if len(finding.hosts) == 1:
        return finding.hosts[0]
    if finding.state == "ok" or set(finding.hosts) >= set(everybody):
        return ""
    return "several hosts"


def _lines(finding: CheckResult, whom: str) -> Iterator[str]:
    text = f"{finding.text} on {whom}" if whom and finding.state == "ok" else finding.text
    text = f"{text} ({whom})" if whom and finding.state != "ok" else text
    head = f"  {finding.state:{_STATE}}{finding.what:{_WHAT}}"
    room = _WIDTH - len(head)
    first, *rest = wrapped(text, room) or [""]
    yield head + first
    yield from (" " * len(head) + line for line in rest)


def _whom(finding: CheckResult, everybody: Sequence[str]) -> str:
    """List the hosts that a finding is about; empty for one."""
    if len(finding.hosts) == 1:
        return ""
    if set(finding.hosts) >= set(everybody) or (
        finding.state == "ok" and len(finding.hosts) > _NAMED
    ):
        return plural(len(finding.hosts), "host")
    return ", ".join(finding.hosts)


def _ways(diagnosis: Diagnosis) -> str:
    """Write the links between hosts: as two tables, or the slowest ones where there are many."""
    links = diagnosis.links
    if not links:
        return ""
    slow = slow_links(links)
    marks = (
        {each.link for each in slow if each.share is not None},
        {each.link for each in slow if each.times is not None},
    )
    hosts = [h for h in diagnosis.hosts if any(h in (k.source, k.target) for k in links)]
    if len(hosts) <= _MAX_COLUMNS:
        return _tables(links, hosts, marks)
    ordered = sorted(links, key=lambda link: link.best_bytes_per_s or 0.0)
    lines = [
        f"  {_bandwidth(k) + _mark(k, marks[0]):12}{_round_trip(k) + _mark(k, marks[1]):10}"
        f"{k.source} to {k.target}"
        for k in ordered[:_LISTED]
    ]
    return "\n".join(
        [
            f"the slowest of {len(links)} links, and their round-trips (* much slower than usual)",
            *lines,
        ]
    )


def _tables(
    links: Sequence[HostLink], hosts: Sequence[str], marks: tuple[set[HostLink], set[HostLink]]
) -> str:
    known = {(link.source, link.target): link for link in links}
    # Long names become numbers, explained in a legend.
    short = all(len(host) < _CELL for host in hosts)
    names = {host: host if short else f"[{n}]" for n, host in enumerate(hosts)}
    left = max(map(len, names.values()))
    tables = []
    titles = ("bandwidth in Mbit/s", "round-trip in ms")
    for title, show, marked in zip(titles, (_megabits, _milliseconds), marks, strict=True):
        lines = [f"{title}, from the host on the left (* much slower than usual)"]
        lines.append("  " + " " * left + "".join(f"{names[host]:>{_CELL}}" for host in hosts))
        for host in hosts:
            cells = (known.get((host, other)) for other in hosts)
            shown = (f"{show(k)}{_mark(k, marked)}" if k else "-" for k in cells)
            lines.append(f"  {names[host]:{left}}" + "".join(f"{cell:>{_CELL}}" for cell in shown))
        tables.append("\n".join(lines))
    legend = [] if short else ["\n".join(f"  {name} {host}" for host, name in names.items())]
    return "\n\n".join([*tables, *legend])


def _megabits(link: HostLink) -> str:
    rate = link.best_bytes_per_s
    return "?" if rate is None else f"{rate * 8 / 1e6:.0f}"


def _milliseconds(link: HostLink) -> str:
    return "?" if link.round_trip_s is None else show_milliseconds(link.round_trip_s)


def _bandwidth(link: HostLink) -> str:
    return show_bandwidth(link.best_bytes_per_s) if link.best_bytes_per_s else "?"


def _round_trip(link: HostLink) -> str:
    return show_time(link.round_trip_s) if link.round_trip_s is not None else "?"


def _mark(link: HostLink, marked: set[HostLink]) -> str:
    return "*" if link in marked else ""


def _summary(diagnosis: Diagnosis) -> str:
    states = [finding.state for finding in folded(diagnosis.findings)]
    faults, warnings = states.count("fault"), states.count("warning")
    if not faults and not warnings:
        return "All is well."
    noted = plural(warnings, "warning")
    if not faults:
        return f"No fault, {noted}."
    return f"{plural(faults, 'fault')}, {noted}. Fix these and rerun `paceline doctor`."
