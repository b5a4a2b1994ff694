"""Runs on a host, one process an attempt: reports facts of the host, then starts its workers.

Phases: look (inspect this host, report its address), reach (connect to the other hosts'
addresses), go (start the workers). A message of the launcher begins each of them.
"""

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from paceline.errors import InfrastructureError, PacelineError, UsageError
from paceline.launch.errors.error_records import set_aside
from paceline.launch.local import forkserver
from paceline.launch.local.attempt import WorkerGroup, attempt_here
from paceline.launch.local.launcher import orphans_adopted
from paceline.launch.local.worker import NodeRendezvous, WorkerTask
from paceline.launch.restart_policy import StopGrace
from paceline.launch.scratch import scratch_directory
from paceline.launch.signals import Interrupts
from paceline.launch.ssh import agent_io
from paceline.launch.ssh.artifact_transfer import ArtifactTransfer
from paceline.launch.ssh.protocol import LEASE_S, Message
from paceline.launch.ssh.remote_watchdog import StateReporter
from paceline.launch.ssh.store import quiet_sockets
from paceline.launch.watchdog.hang_detector import HangLimits
from paceline.options.entry_points import imported
from paceline.options.fields import read_dataclass
from paceline.results.run_directory import RunDirectory

_REACH_S = 5.0
_POLL_S = 0.2
_PREDECESSOR_S = LEASE_S + 5.0
_LAUNCHER_S = 600.0
"""For the launcher's next message: it waits for hosts that are slow to connect."""


@final
class LauncherMessages:
    """What the launcher sends, received by a thread: a stop must not wait for the main one."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self.reporter: StateReporter | None = None
        """Gets the launcher's requests for the workers' stacks."""
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def next(self, expected: str) -> Message:
        """Wait for the next message.

        Raises:
            InfrastructureError: Another one came, or none.
        """
        try:
            message = self._inbox.get(timeout=_LAUNCHER_S)
        except queue.Empty:
            raise InfrastructureError("the launcher has said nothing") from None
        if expected not in message:
            raise InfrastructureError(f"the launcher should have said {expected}")
        return message

    def _receive(self) -> None:
        for message in agent_io.received():
            if message.get("stop"):
                os.kill(os.getpid(), signal.SIGTERM)
            elif message.get("kill"):
                self._interrupts.abandon()
            elif message.get("stacks"):
                if self.reporter is not None:
                    self.reporter.request_stacks()
            else:
                self._inbox.put(message)


def main() -> None:
    """Run one host's part of one attempt."""
    spec = agent_io.payload()
    quiet_sockets()
    interrupts = Interrupts(read_dataclass(StopGrace, spec["stop"]))
    with interrupts.caught():  # to the end: the last message must not be cut off
        try:
            _take_part(spec, LauncherMessages(interrupts), interrupts)
        except PacelineError as error:
            agent_io.send({"refused": str(error), "code": int(error.exit_code)})


def _take_part(spec: Message, messages: LauncherMessages, interrupts: Interrupts) -> None:
    # Phase 1, look: what is here, and is the run directory the launcher's own (by its token)?
    seen = _inspect(spec)
    run = RunDirectory.named(str(spec["run_dir"]))
    shared = (run.path / str(spec["token"])).exists()
    if spec["is_new"] and not shared:
        run.check_new()
    address = str(seen["address"])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        threading.Thread(target=_answer, args=(listener,), daemon=True).start()
        port = int(listener.getsockname()[1])
        agent_io.send(
            {"seen": {**seen, "port": port, "shared": shared, "newest": run.newest_step()}}
        )
        # Phase 2, reach: try the other hosts, while the listener answers theirs.
        reach = messages.next("reach")["reach"]
        agent_io.send({"unreachable": _unreachable(reach if isinstance(reach, list) else [])})
        # Phase 3, go: the launcher has given this host its ranks.
        go = messages.next("go")["go"]
        listener.shutdown(socket.SHUT_RDWR)  # closing alone doesn't wake the one who accepts
    assert isinstance(go, dict)
    place = HostPlace(run=run, shared=shared, rendezvous=_rendezvous(go, str(seen["interface"])))
    # The reporter is set before the workers start: the launcher may ask for stacks from then on.
    if isinstance(limits := spec["hang"], dict):
        messages.reporter = StateReporter(HangLimits(**limits), run.logs)
    agent_io.send(_run(spec, seen, go, place, interrupts, messages.reporter))


def _inspect(spec: Message) -> dict[str, object]:
    """Have the trainer report this host's facts, and start the fork server for its workers."""
    inspect: Callable[[str], str] = imported(str(spec["inspect"]))
    content = json.loads(inspect(json.dumps(spec)))
    assert isinstance(content, dict)
    preload = spec["preload"]
    forkserver.prepare(preload if isinstance(preload, list) else [], int(content["threads"]))
    return content


def _answer(listener: socket.socket) -> None:
    """Accept connections: that alone shows that this host can be reached."""
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


def _unreachable(hosts: Sequence[tuple[str, str, int]]) -> list[str]:
    """Try other hosts' addresses, all at once: name those that don't answer."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        answers = list(pool.map(_answers, hosts))
    return [host[0] for host, answered in zip(hosts, answers, strict=True) if not answered]


def _answers(host: tuple[str, str, int]) -> bool:
    _, address, port = host
    try:
        socket.create_connection((address, port), timeout=_REACH_S).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class HostPlace:
    """Where this host stands, and where it writes."""

    run: RunDirectory
    shared: bool
    """Whether the launcher sees the same run directory."""
    rendezvous: NodeRendezvous


def _rendezvous(go: Mapping[str, object], interface: str) -> NodeRendezvous:
    return NodeRendezvous(
        node_rank=int(str(go["node_rank"])),
        nodes=int(str(go["nodes"])),
        host="127.0.0.1",
        port=int(str(go["store_port"])),
        interface=interface,
    )


def _run(
    spec: Message,
    seen: Mapping[str, object],
    go: Mapping[str, object],
    place: HostPlace,
    interrupts: Interrupts,
    reporter: StateReporter | None,
) -> Message:
    """Start the workers, wait for their end, and return their results and failures."""
    run, rendezvous = place.run, place.rendezvous
    first, workers = int(str(go["first_rank"])), int(str(seen["workers"]))
    leads, ranks = rendezvous.node_rank == 0, range(first, first + workers)
    with ExitStack() as stack:
        # A run directory of this host's own: make it, set old records aside, and send home what
        # is written there.
        if not place.shared:
            settings = json.loads(str(seen["payload"])).get("settings") or {}
            replace(run, shared=settings.get("share_run_dir") is True).make()
            if leads:
                stack.enter_context(_owned(run))
                run.remove_summary()
            set_aside(run.logs, f"before-{spec['attempt']}", ranks)  # others write theirs
            _write_files(run.path, go.get("files"))
            stack.enter_context(ArtifactTransfer(run, ranks, leads=leads).running())
        # The attempt itself, as on one machine.
        scratch = stack.enter_context(scratch_directory())
        stack.enter_context(orphans_adopted())
        task = WorkerTask(
            entry=str(spec["entry"]),
            payload=str(seen["payload"]),
            log_dir=run.logs,
            scratch=scratch,
            shows_each_node=True,
        )
        group = WorkerGroup.of(task, workers, int(str(seen["threads"])), interrupts, rendezvous)
        if reporter is not None:
            group = replace(group, watch=reporter.start)
        results, failures = attempt_here(group, int(str(spec["attempt"])))
        return {
            "results": {str(rank): result for rank, result in results.items()},
            "failures": [failure.to_json() for failure in failures],
            "newest": run.newest_step(),
        }


@contextmanager
def _owned(run: RunDirectory) -> Iterator[None]:
    """Own this host's run directory; what an attempt that was cut off had started ends by itself.

    Raises:
        InfrastructureError: Another training has it.
    """
    deadline_s = time.monotonic() + _PREDECESSOR_S
    with ExitStack() as stack:
        while True:
            try:
                # An attempt whose connection broke holds the lock until its lease is over.
                stack.enter_context(run.lock())
            except UsageError as error:
                if time.monotonic() > deadline_s:
                    raise InfrastructureError(str(error)) from error
                time.sleep(_POLL_S)
            else:
                break
        yield


def _write_files(directory: Path, files: object) -> None:
    """Write what an earlier attempt's first host had left, where another one takes its place."""
    if isinstance(files, dict):
        for name, text in files.items():
            (directory / Path(name).name).write_text(str(text))


if __name__ == "__main__":
    main()
