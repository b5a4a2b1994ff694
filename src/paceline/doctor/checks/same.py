"""What has to be the same on all hosts: versions, processors, clocks, data, files."""

from collections.abc import Iterator, Mapping, Sequence

from paceline.doctor.bandwidth import Pair
from paceline.doctor.check_result import CheckResult, common, fault, ok, warning
from paceline.doctor.facts import Contact, HostFacts
from paceline.options.figures import show_time
from paceline.options.text import clause

_MAY_DIFFER = frozenset({"driver"})
_SHOWN = ("Paceline", "torch", "Python")
_CLOCK_S = 2.0
_FIXES = {
    "Paceline": "Install the same everywhere, or say --install",
    "Paceline's code": "One number, other files: install the same everywhere, or say --install",
    "driver": "It may work; the same everywhere is one question less",
}


def check_versions(facts: Mapping[str, HostFacts]) -> Iterator[CheckResult]:
    """Compare what is installed."""
    # torch that is there but broken.
    for host, known in facts.items():
        if known.software.torch_problem:
            why = clause(known.software.torch_problem)
            text = f"it can't be imported: {why}. Install it anew"
            yield fault(host, "torch", text)
    # Each package against the version that most hosts have.
    versions = {host: dict(known.software.versions) for host, known in facts.items()}
    names = list(dict.fromkeys(name for installed in versions.values() for name in installed))
    differing = {name: _differing(name, versions) for name in names}
    for name, others in differing.items():
        for host, (own, usual) in others.items():
            fix = _FIXES.get(name, "Install the same everywhere")
            text = f"{name} {own}, and {usual} on the others. {fix}"
            state = warning if name in _MAY_DIFFER else fault
            yield state(host, "versions", text)
    # Hosts without a finding are well: show their main versions.
    wrong = {host for others in differing.values() for host in others}
    for host, installed in versions.items():
        if host not in wrong:
            shown = [f"{name} {installed[name]}" for name in _SHOWN if name in installed]
            yield ok(host, "versions", ", ".join(shown))


def check_launcher(versions: Mapping[str, str], own: str) -> Iterator[CheckResult]:
    """Compare the hosts' Paceline with the one that would start the training.

    Args:
        versions: By host.
    """
    for host, version in versions.items():
        if version != own:
            text = f"Paceline {version} is installed there, and {own} here. {_FIXES['Paceline']}"
            yield fault(host, "launcher", text)


def _differing(
    name: str, versions: Mapping[str, Mapping[str, str]]
) -> Mapping[str, tuple[str, str]]:
    """List the hosts with another version than most: theirs, and the usual one."""
    values = [installed.get(name, "none") for installed in versions.values()]
    usual = common(values)
    return {
        host: (installed.get(name, "none"), usual)
        for host, installed in versions.items()
        if installed.get(name, "none") != usual
    }


def check_processors(facts: Mapping[str, HostFacts]) -> Iterator[CheckResult]:
    """Compare the processors: bits depend on their instructions, the pace on their speed."""
    kinds = {h: (f.machine.processor, f.machine.capability) for h, f in facts.items()}
    shown = {host: f"{name} ({kind})" if kind else name for host, (name, kind) in kinds.items()}
    usual = common(list(shown.values())) if shown else ""
    for host, own in shown.items():
        if own == usual:
            yield ok(host, "processor", own)
        else:
            yield warning(
                host,
                "processor",
                f"{own}, and {usual} on the others: the slowest sets the pace, and with --shards "
                "the bits may depend on which host computes",
            )


def check_clocks(contacts: Mapping[Pair, Contact], hosts: Sequence[str]) -> Iterator[CheckResult]:
    """Compare clocks with the first host's."""
    right = list(hosts[:1])
    for host in hosts[1:]:
        # None where the hosts couldn't connect: other checks report that.
        ahead = _ahead(contacts, hosts[0], host)
        if ahead is None:
            continue
        offset_s, error_s = ahead
        if abs(offset_s) > _CLOCK_S + error_s:
            way = "ahead of" if offset_s > 0 else "behind"
            yield warning(
                host,
                "clock",
                f"{show_time(abs(offset_s))} {way} {hosts[0]}'s. Training doesn't mind, but times "
                "in logs won't fit, and TLS may refuse: run chrony or systemd-timesyncd",
            )
        else:
            right.append(host)
    if len(right) == len(hosts):
        text = f"within {_CLOCK_S:g} s of one another"
        yield ok(hosts, "clock", text)


def _ahead(contacts: Mapping[Pair, Contact], first: str, host: str) -> tuple[float, float] | None:
    there, back = contacts.get((first, host)), contacts.get((host, first))
    if there is not None and there.clock_ahead_s is not None:
        return there.clock_ahead_s, there.clock_error_s
    if back is not None and back.clock_ahead_s is not None:
        return -back.clock_ahead_s, back.clock_error_s
    return None


def check_files(writer: str, place: str, seen: Mapping[str, bool]) -> Iterator[CheckResult]:
    """Say whether all hosts see one directory.

    Args:
        writer: Host that has written there.
        seen: Whether the others see it, by host.
    """
    blind = [host for host, sees in seen.items() if not sees]
    everybody = (writer, *seen)
    if not blind:
        text = f"{place} is shared: snapshots are written once"
    elif len(blind) == len(seen):
        text = f"{place} is each host's own: each keeps its own snapshots"
    else:
        text = (
            f"{place} is shared by some hosts only; not by {', '.join(blind)}. Mount it there as "
            "well, or name a place by --run-dir that is shared by all or by none"
        )
        yield warning(blind, "shared files", text)
        return
    yield ok(everybody, "shared files", text)


def check_data(
    data: Mapping[str, Mapping[str, str]], problems: Mapping[str, str]
) -> Iterator[CheckResult]:
    """Compare the data sets of a recipe.

    Args:
        data: What each host has, by host and name of the set.
        problems: Why a host's can't be read.
    """
    for host, problem in problems.items():
        yield fault(host, "data", f"{problem} (the recipe and its data must be on every host)")
    names = list(dict.fromkeys(name for sets in data.values() for name in sets))
    for name in names:
        usual = common([sets.get(name, "none") for sets in data.values()])
        for host, sets in data.items():
            own = sets.get(name, "none")
            if own == usual:
                yield ok(host, "data", f"{name}: {own}")
            else:
                yield fault(
                    host,
                    "data",
                    f"{name}: {own}, and {usual} on the others. Copy the same data to every host",
                )
