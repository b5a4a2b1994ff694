"""Runs on each host for the doctor: answers its launcher's questions one after another."""

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, final

from paceline.doctor.facts import (
    Contact,
    DiskFacts,
    HostFacts,
)
from paceline.doctor.probes import client, machine, network, software, storage
from paceline.doctor.probes.handshake import Tokens
from paceline.doctor.probes.server import ProbeServer
from paceline.doctor.probes.storage import DataRequest, data_facts
from paceline.launch.ssh import agent_io
from paceline.options.fields import read_dataclass

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Question = Mapping[str, object]
Answer = Mapping[str, object]
Part = TypeVar("Part")

_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class ContactRequest:
    """A request to connect to other hosts' probes."""

    peers: tuple[client.Peer, ...] = ()
    mtu: int = 1500
    """Of this host's interface to them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measurement of one link."""

    name: str = ""
    """This host's."""
    peer: client.Peer = field(default_factory=client.Peer)
    duration_s: float = 0.5


@final
class Probe:
    """Answers questions; keeps what listens between them."""

    def __init__(self, tokens: Tokens, work: Path, place: str) -> None:
        """Prepare; `answer` answers.

        Args:
            tokens: By which probes know each other.
            work: The working directory of a training.
            place: Where run directories go, from there.
        """
        self._tokens = tokens
        self._work = work
        self._directory = str(work / Path(place).expanduser())
        self._listener: ProbeServer | None = None
        self._store: TCPStore | None = None
        self._answers: Mapping[str, Callable[[Question], Answer]] = {
            "facts": self._facts,
            "names": self._names,
            "listen": self._listen,
            "contacts": self._contacts,
            "measure": self._measure,
            "close": self._close,
            "store": self._keep_store,
            "all_reduce": self._all_reduce,
            "mark": self._mark,
            "see": self._see,
            "unmark": self._unmark,
            "data": self._data,
        }

    def answer(self, question: Question) -> Answer:
        """Answer one question; a problem is an answer as well."""
        try:
            return {"answer": self._answers[str(question.get("ask"))](question)}
        except Exception as error:  # noqa: BLE001  # the process boundary: reported to the launcher
            text = str(error).strip() or type(error).__name__
            return {"problem": text.splitlines()[0]}

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    def _facts(self, question: Question) -> Answer:
        unknown: dict[str, str] = {}

        def facts_or(name: str, read: Callable[[], Part], default: Part) -> Part:
            """Read one part; one that can't be read is noted as unknown, and hides no other."""
            try:
                return read()
            except Exception as error:  # noqa: BLE001  # whatever a library raises
                unknown[name] = f"{type(error).__name__}: {error}"
                return default

        none = HostFacts()
        facts = HostFacts(  # the machine first, while nothing of ours makes it busy
            machine=facts_or("machine", machine.machine_facts, none.machine),
            network=facts_or("network", network.network_facts, none.network),
            limits=facts_or("limits", machine.limit_facts, none.limits),
            disk=facts_or("disk", self._disk, none.disk),
            software=facts_or("software", software.software_facts, none.software),
        )
        # These parts import torch.
        if not facts.software.torch_problem:
            capability = facts_or("capability", software.capability, "")
            facts = replace(
                facts,
                machine=replace(facts.machine, capability=capability),
                gpus=facts_or("gpus", machine.gpu_facts, none.gpus),
            )
        return asdict(replace(facts, unknown=unknown))

    def _disk(self) -> DiskFacts:
        missing = "" if self._work.is_dir() else str(self._work)
        return replace(storage.disk_facts(self._directory), missing=missing)

    def _names(self, question: Question) -> Answer:
        names = question.get("names")
        return network.meanings([str(name) for name in names] if isinstance(names, list) else [])

    def _listen(self, question: Question) -> Answer:
        self.close()
        ports = network.network_facts().port_range
        self._listener = ProbeServer(str(question.get("address")), self._tokens, ports)
        return {"ports": self._listener.ports, "datagram_port": self._listener.datagram_port}

    def _contacts(self, question: Question) -> Answer:
        request = read_dataclass(ContactRequest, question)

        def contact(peer: client.Peer) -> Contact:
            return client.contact(peer, self._tokens, request.mtu)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            reached = list(pool.map(contact, request.peers))
        pairs = zip(request.peers, reached, strict=True)
        return {peer.name: asdict(contact) for peer, contact in pairs}

    def _measure(self, question: Question) -> Answer:
        run = read_dataclass(Run, question)
        return asdict(client.measure(run.peer, self._tokens, run.duration_s, run.name))

    def _close(self, question: Question) -> Answer:
        self.close()
        return {}

    def _keep_store(self, question: Question) -> Answer:
        from paceline.doctor.probes.collective import open_store

        timeout_s = float(str(question.get("timeout_s")))
        self._store, port = open_store(str(question.get("address")), timeout_s)
        return {"port": port}

    def _all_reduce(self, question: Question) -> Answer:
        from paceline.doctor.probes.collective import AllReducePlan, all_reduce

        store, self._store = self._store, None
        return asdict(all_reduce(read_dataclass(AllReducePlan, question), store))

    def _mark(self, question: Question) -> Answer:
        path, text = storage.leave_mark(self._directory)
        return {"path": path, "text": text}

    def _see(self, question: Question) -> Answer:
        return {"sees": storage.sees_mark(str(question.get("path")), str(question.get("text")))}

    def _unmark(self, question: Question) -> Answer:
        storage.remove_mark(str(question.get("path")))
        return {}

    def _data(self, question: Question) -> Answer:
        return data_facts(read_dataclass(DataRequest, question))


def main() -> None:
    """Answer until there are no more questions."""
    payload = agent_io.payload()
    work = Path(str(payload.get("directory") or "~")).expanduser()
    if work.is_dir():  # from there a recipe's modules and data may be named
        os.chdir(work)
        sys.path.insert(0, str(work))
    probe = Probe(
        read_dataclass(Tokens, payload.get("tokens")),
        work,
        str(payload.get("place") or "."),
    )
    try:
        for question in agent_io.received():
            agent_io.send({"number": question.get("number"), **probe.answer(question)})
    finally:
        probe.close()


if __name__ == "__main__":
    main()
