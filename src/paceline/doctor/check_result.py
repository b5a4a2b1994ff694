"""Findings: lines that say what is well, what may slow a training, and what would stop it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from paceline.distributed.environment_check import State

ORDER: tuple[State, ...] = ("fault", "warning", "ok")


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One line of what was found."""

    hosts: tuple[str, ...]
    """What it is about: one host, a pair, several, or all."""
    what: str
    """One word or two: `versions`, `ports`, `memory` …"""
    state: State
    text: str
    """What was found and, where it isn't ok, how to mend it."""

    def to_json(self) -> dict[str, object]:
        """Give it as JSON."""
        return asdict(self) | {"hosts": list(self.hosts)}


def ok(hosts: str | Iterable[str], what: str, text: str) -> CheckResult:
    """Say that something is well on a host, or on several."""
    return CheckResult(hosts=_named(hosts), what=what, state="ok", text=text)


def warning(hosts: str | Iterable[str], what: str, text: str) -> CheckResult:
    """Say what may slow a training, or stop it later."""
    return CheckResult(hosts=_named(hosts), what=what, state="warning", text=text)


def fault(hosts: str | Iterable[str], what: str, text: str) -> CheckResult:
    """Say what would stop a training."""
    return CheckResult(hosts=_named(hosts), what=what, state="fault", text=text)


def _named(hosts: str | Iterable[str]) -> tuple[str, ...]:
    return (hosts,) if isinstance(hosts, str) else tuple(hosts)


def folded(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Make one finding of those that say the same of several hosts, at the place of the first."""
    groups: dict[tuple[str, State, str], list[str]] = {}
    for finding in findings:
        named = groups.setdefault((finding.what, finding.state, finding.text), [])
        named += [host for host in finding.hosts if host not in named]
    return [
        CheckResult(hosts=tuple(hosts), what=what, state=state, text=text)
        for (what, state, text), hosts in groups.items()
    ]


def has_fault(findings: Iterable[CheckResult]) -> bool:
    """Tell whether anything would stop a training."""
    return any(finding.state == "fault" for finding in findings)


def common(values: Sequence[str]) -> str:
    """Give the value that most have; the first one of several."""
    return max(values, key=values.count)
