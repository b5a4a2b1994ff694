"""The examination of hosts, step by step: ask the probes, hand what they say to the checks.

Phases: facts of every host; names and addresses; ports between all pairs; speed, pair by pair; an
all-reduce over all; files and data. Each phase leaves out who has ceased to answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import final

from paceline.doctor.bandwidth import HostLink, Pair, measuring_s, rounds
from paceline.doctor.check_result import CheckResult, fault, has_fault, warning
from paceline.doctor.checks.gpus import check_gpus, check_same_gpus
from paceline.doctor.checks.machine import Requirements, check_machine, workers_on
from paceline.doctor.checks.network import (
    check_address,
    check_addresses,
    check_congestion,
    check_meanings,
    check_mtu,
    check_name,
    check_packets,
    check_ports,
)
from paceline.doctor.checks.same import (
    check_clocks,
    check_data,
    check_files,
    check_processors,
    check_versions,
)
from paceline.doctor.checks.speed import (
    AllReduce,
    check_all_reduce,
    check_links,
    size_to_reduce,
)
from paceline.doctor.facts import AddressChoice, Contact, HostFacts, choose_address, meanings_of
from paceline.doctor.host_pool import Answers, HostPool
from paceline.errors import ExitCode
from paceline.options.fields import read_dataclass

_FACTS_S, _NAMES_S, _LISTEN_S = 120.0, 60.0, 20.0
_CONTACTS_S, _CONTACT_S = 30.0, 3.0
_MEASURE_S = 40.0
_REDUCE_S = 40.0
_FILES_S, _DATA_S = 20.0, 600.0


@dataclass(frozen=True, kw_only=True)
class DiagnosisRequest:
    """What is to be examined."""

    on_gpus: bool = True
    """Whether GPUs are to be used where there are any."""
    interface: str | None = None
    loader_workers: int = 2
    recipe: Mapping[str, object] | None = None
    """As `probes.storage.DataRequest`; None: no recipe was named."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that was found."""

    hosts: tuple[str, ...]
    """All that were named, in their order."""
    findings: tuple[CheckResult, ...]
    facts: Mapping[str, HostFacts] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    links: tuple[HostLink, ...] = ()
    all_reduce: AllReduce | None = None
    unreachable: tuple[str, ...] = ()
    """Hosts that couldn't be reached at all."""

    @property
    def exit_code(self) -> ExitCode:
        """What a command ends with."""
        if self.unreachable:
            return ExitCode.INFRASTRUCTURE
        return ExitCode.JOB if has_fault(self.findings) else ExitCode.DONE


@final
class Examination:
    """Examines hosts; `run` does it all."""

    def __init__(
        self, pool: HostPool, request: DiagnosisRequest, print_line: Callable[[str], None]
    ) -> None:
        """Store what is to be done.

        Args:
            print_line: Called with what is being done, for the user.
        """
        self._pool = pool
        self._diagnosis_request = request
        self._print_line = print_line
        self._named = tuple(pool.names)
        self._findings: list[CheckResult] = []
        self._facts: dict[str, HostFacts] = {}
        self._choices: dict[str, AddressChoice] = {}
        self._contacts: dict[Pair, Contact] = {}
        self._links: list[HostLink] = []
        self._all_reduce: AllReduce | None = None

    def run(self) -> Diagnosis:
        """Examine. Blocks; each phase has a limit of time."""
        self._query_facts()
        if len(self._facts) > 1:
            self._choose_addresses()
            self._connect()
            self._measure()
            self._reduce()
            self._look_at_files()
        if self._diagnosis_request.recipe is not None:
            self._look_at_data(self._diagnosis_request.recipe)
        self._findings += self._pool.losses
        return Diagnosis(
            hosts=self._named,
            findings=tuple(self._findings),
            facts=self._facts,
            addresses={host: choice.address for host, choice in self._choices.items()},
            links=tuple(self._links),
            all_reduce=self._all_reduce,
        )

    @property
    def _usable(self) -> list[str]:
        """Hosts that still answer and have an address."""
        return [n for n in self._pool.names if n in self._choices and self._choices[n].address]

    def _query_facts(self) -> None:
        """Learn what each host is, and check it by itself and beside the others."""
        self._print_line("looking at every host")
        answers, problems = self._pool.query_all({"ask": "facts"}, _FACTS_S)
        for host, answer in answers.items():
            try:
                self._facts[host] = read_dataclass(HostFacts, answer)
            except (ValueError, TypeError) as error:
                problems[host] = f"its probe is of another version ({error})"
        # Check each host by itself, for the workers that it would get.
        self._note_problems("facts", problems)
        slots = {host.name: host.slots for host in self._pool.hosts}
        on_gpus = self._diagnosis_request.on_gpus
        workers = {h: workers_on(f, slots.get(h), on_gpus) for h, f in self._facts.items()}
        for host, facts in self._facts.items():
            required = Requirements(
                workers=workers[host][0],
                on_gpus=workers[host][1],
                loader_workers=self._diagnosis_request.loader_workers,
                world_size=sum(number for number, _ in workers.values()),
                has_recipe=self._diagnosis_request.recipe is not None,
            )
            if len(self._facts) > 1:
                self._findings += check_name(host, facts)
            self._findings += check_machine(host, facts, required)
            self._findings += check_gpus(host, facts.gpus, required)
        # Check the hosts against one another.
        self._findings += check_congestion(self._facts)
        self._findings += check_versions(self._facts)
        self._findings += check_processors(self._facts)
        self._findings += check_same_gpus(self._facts)

    def _choose_addresses(self) -> None:
        """Choose an address for each host, and check what the others take its name for."""
        hosts = list(self._facts)
        answers, problems = self._pool.query_all({"ask": "names", "names": hosts}, _NAMES_S)
        self._note_problems("name", problems)
        known = {
            host: {str(n): str(v) if v is not None else None for n, v in answer.items()}
            for host, answer in answers.items()
        }
        # Choose the address at which the others reach each host.
        given = {host.name: host.address for host in self._pool.hosts}
        for host, facts in self._facts.items():
            choice = choose_address(
                facts.network,
                given.get(host),
                meanings_of(host, known, host),
                self._diagnosis_request.interface,
            )
            self._choices[host] = choice
            self._findings += check_address(host, choice, facts, given.get(host))
        self._findings += check_addresses(self._choices)
        # What names stand for on other hosts is checked by every address that a host has.
        own = {
            host: {a for i in facts.network.interfaces for a in i.addresses}
            for host, facts in self._facts.items()
        }
        self._findings += check_meanings(hosts, known, own)
        self._findings += check_mtu({h: c for h, c in self._choices.items() if c.address})

    def _connect(self) -> None:
        """Have each host open ports, and every other one call there."""
        self._print_line("connecting every host with every other")
        questions = {
            host: {"ask": "listen", "address": self._choices[host].address} for host in self._usable
        }
        # Every host listens first, then every host calls all others.
        listening, problems = self._pool.query(questions, _LISTEN_S)
        self._note_problems("ports", problems)
        self._peers = {
            host: {"name": host, "address": self._choices[host].address, **answer}
            for host, answer in listening.items()
        }
        contacts = {
            host: {
                "ask": "contacts",
                "peers": [peer for name, peer in self._peers.items() if name != host],
                "mtu": self._mtu(host),
            }
            for host in self._peers
        }
        # Each try may run into its time-out, so the limit grows with the hosts.
        answers, problems = self._pool.query(contacts, _CONTACTS_S + _CONTACT_S * len(self._peers))
        self._note_problems("ports", problems)
        for host, answer in answers.items():
            for other, contact in answer.items():
                self._contacts[host, other] = read_dataclass(Contact, contact)
        self._check_contacts()

    def _check_contacts(self) -> None:
        addresses = {host: choice.address for host, choice in self._choices.items()}
        ranges = {host: facts.network.port_range for host, facts in self._facts.items()}
        self._findings += check_ports(self._contacts, addresses, ranges)
        mtus = {host: self._mtu(host) for host in self._choices}
        self._findings += check_packets(self._contacts, mtus)
        self._findings += check_clocks(self._contacts, list(self._facts))

    def _measure(self) -> None:
        """Measure pair by pair, so that no host is in two measurements at once."""
        hosts = [host for host in self._usable if host in self._peers]
        duration_s = measuring_s(len(hosts))
        for number, pairs in enumerate(rounds(hosts), 1):
            self._print_line(f"measuring, round {number} of {len(rounds(hosts))}")
            # Both directions, one after the other: duplex faults show in one alone.
            for way in (pairs, [(b, a) for a, b in pairs]):
                answers, _ = self._pool.query(
                    {a: self._measurement(a, b, duration_s) for a, b in way if self._meets(a, b)},
                    _MEASURE_S + 4 * duration_s,
                )
                self._links += [read_dataclass(HostLink, answer) for answer in answers.values()]
        self._pool.query({host: {"ask": "close"} for host in self._peers}, _LISTEN_S)
        self._links.sort(key=lambda link: (hosts.index(link.source), hosts.index(link.target)))
        self._findings += check_links(self._links, hosts, self._choices)

    def _measurement(self, source: str, target: str, duration_s: float) -> Mapping[str, object]:
        peer = dict(self._peers[target])
        peer["ports"] = list(self._contacts[source, target].open_ports)
        return {"ask": "measure", "name": source, "peer": peer, "duration_s": duration_s}

    def _meets(self, source: str, target: str) -> bool:
        contact = self._contacts.get((source, target))
        return contact is not None and bool(contact.open_ports)

    def _is_open(self, source: str, target: str) -> bool:
        contact = self._contacts.get((source, target))
        return contact is not None and not contact.closed_ports

    def _reduce(self) -> None:
        """Time an all-reduce over all hosts, where every link between them works."""
        hosts = [host for host in self._usable if host in self._peers]
        # An all-reduce over links that don't work would only wait for its time-out.
        missing = [pair for pair in permutations(hosts, 2) if not self._is_open(*pair)]
        stuck = [link for link in self._links if link.problem]
        if len(hosts) < 2 or missing or stuck:
            if missing or stuck:
                text = "not tried, since the links between the hosts have faults"
                self._findings.append(warning(hosts, "all-reduce", text))
            return
        self._print_line("adding up over all hosts")
        has_gpus = all(self._facts[host].gpus.kind == "cuda" for host in hosts)
        plan = {
            "backend": "nccl" if has_gpus and self._diagnosis_request.on_gpus else "gloo",
            "size_bytes": size_to_reduce(self._links),
        }
        answers, problems = self._all_reduced(hosts, plan)
        self._all_reduce = _reduced(len(hosts), plan, answers, problems)
        self._findings.append(check_all_reduce(self._all_reduce, self._links, hosts))

    def _all_reduced(
        self, hosts: Sequence[str], plan: Mapping[str, object]
    ) -> tuple[Answers, dict[str, str]]:
        first, address = hosts[0], self._choices[hosts[0]].address
        store = {"ask": "store", "address": address, "timeout_s": _REDUCE_S}
        # The first host keeps the store, at its own address; then all join at once.
        kept, problems = self._pool.query({first: store}, _LISTEN_S)
        if first not in kept:
            return {}, problems
        questions = {}
        for rank, host in enumerate(hosts):
            interface = self._choices[host].interface
            questions[host] = {
                **plan,
                "ask": "all_reduce",
                "rank": rank,
                "world_size": len(hosts),
                "master": address,
                "port": kept[first]["port"],
                "interface": interface.name if interface is not None else "",
                "timeout_s": _REDUCE_S,
            }
        return self._pool.query(questions, 2 * _REDUCE_S)

    def _look_at_files(self) -> None:
        self._print_line("looking at files")
        first, *others = [name for name in self._pool.names if name in self._facts] or [""]
        left, problems = self._pool.query({first: {"ask": "mark"}}, _FILES_S)
        self._note_problems("shared files", problems)
        if first not in left:
            return
        # The first host's file is there before the others look, and goes after that.
        question = {**left[first], "ask": "see"}
        answers, _ = self._pool.query(dict.fromkeys(others, question), _FILES_S)
        self._pool.query({first: {**left[first], "ask": "unmark"}}, _FILES_S)
        seen = {host: bool(answer.get("sees")) for host, answer in answers.items()}
        if seen:
            self._findings += check_files(first, self._facts[first].disk.directory, seen)

    def _look_at_data(self, recipe: Mapping[str, object]) -> None:
        self._print_line("looking at the data")
        answers, problems = self._pool.query_all({**recipe, "ask": "data"}, _DATA_S)
        sets = {h: {str(n): str(v) for n, v in a.items()} for h, a in answers.items()}
        self._findings += check_data(sets, problems)

    def _mtu(self, host: str) -> int:
        interface = self._choices[host].interface
        return interface.mtu if interface is not None else 1500

    def _note_problems(self, what: str, problems: Mapping[str, str]) -> None:
        lost = {loss.hosts[0] for loss in self._pool.losses}
        for host, problem in problems.items():
            if host not in lost:
                self._findings.append(fault(host, what, problem))


def _reduced(
    hosts: int, plan: Mapping[str, object], answers: Answers, problems: Mapping[str, str]
) -> AllReduce:
    backend, size = str(plan["backend"]), int(str(plan["size_bytes"]))
    if problems or not answers:
        who = "; ".join(f"{host}: {problem}" for host, problem in problems.items())
        return AllReduce(hosts=hosts, backend=backend, size_bytes=size, problem=who)
    return AllReduce(
        hosts=hosts,
        backend=backend,
        size_bytes=size,
        seconds=max(float(str(answer["seconds"])) for answer in answers.values()),
        is_right=all(answer["is_right"] is True for answer in answers.values()),
    )


def as_json(diagnosis: Diagnosis) -> dict[str, object]:
    """Give all that was found as JSON."""
    return {
        "findings": [found.to_json() for found in diagnosis.findings],
        "hosts": [
            {
                "name": host,
                "address": diagnosis.addresses.get(host),
                "reachable": host not in diagnosis.unreachable,
                **(asdict(diagnosis.facts[host]) if host in diagnosis.facts else {}),
            }
            for host in diagnosis.hosts
        ],
        "links": [link.to_json() for link in diagnosis.links],
        "all_reduce": diagnosis.all_reduce.to_json() if diagnosis.all_reduce else None,
    }
