"""A training over several hosts, from its first connection to its last attempt."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

from paceline.errors import InfrastructureError, JobError, PacelineError
from paceline.launch.failures import WorkerFailure
from paceline.launch.hosts.connection import Connection, Fleet, connect, wait_for
from paceline.launch.hosts.hostfile import Host
from paceline.launch.hosts.members import Stopping
from paceline.launch.hosts.options import HostsOptions
from paceline.launch.hosts.overseeing import Oversight
from paceline.launch.hosts.party import Order, Party, show_line
from paceline.launch.hosts.seats import clock_lines
from paceline.launch.hosts.store import kept_store
from paceline.launch.local import LaunchOutcome, restart_line, set_aside, to_stderr
from paceline.launch.restarts import Policy, RestartBudget
from paceline.launch.signals import InterruptedStartError, Interrupts

_RETRY_S = 5.0
_BACK_S = 5.0
"""How long a restart waits for hosts that were lost: a broken connection is mended in this time."""
_WAIT_S = 600.0
"""How long a training waits for enough hosts before it gives up."""
_POLL_S = 0.2


@final
class Returning:
    """Brings back hosts that were lost, and takes in those that the hostfile names anew."""

    def __init__(
        self,
        fleet: Fleet,
        options: HostsOptions,
        ready: Callable[[Sequence[Host]], Sequence[Host]],
        store_port: int,
    ) -> None:
        self._fleet = fleet
        self._options = options
        self._ready = ready
        self._store_port = store_port
        self._found: dict[str, Connection] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="paceline-hosts", daemon=True)

    @contextmanager
    def running(self) -> Iterator["Returning"]:
        """Look for them in the background."""
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()
            for connection in self._found.values():
                connection.close()

    def take_in(self, least: int, stopping: Stopping, say: Callable[[str], None]) -> None:
        """Add the hosts that are back to the fleet.

        Args:
            least: How many hosts there must be; it is waited for them.
            stopping: The user's wish to stop, which ends the wait.
            say: Is told of hosts that come, and of waiting.

        Raises:
            InfrastructureError: There aren't enough in time.
        """
        begun_s, told = time.monotonic(), False
        while True:
            wanted = self._options.read()
            hosts = self._merge(wanted, say)
            waited_s = time.monotonic() - begun_s
            if len(hosts) >= len(wanted) or stopping.stop:
                return
            if len(hosts) >= least and waited_s > _BACK_S:
                return
            if waited_s > _WAIT_S:
                raise InfrastructureError(
                    f"{len(hosts)} of {len(wanted)} hosts are left after {_WAIT_S:g} s, and "
                    f"--min-hosts is {least}"
                )
            if waited_s > _BACK_S and not told:
                told = True
                say(f"Waiting for hosts: {len(hosts)} of at least {least} are there")
            time.sleep(_POLL_S)

    def _merge(self, wanted: Sequence[Host], say: Callable[[str], None]) -> list[Connection]:
        with self._lock:
            found, self._found = self._found, {}
        alive = {connection.host.name: connection for connection in self._fleet.hosts}
        for name, connection in found.items():
            if name not in alive and not connection.lost:
                say(f"{name} is back, and takes part from now on")
                alive[name] = connection
            else:
                connection.close()
        listed = [alive.pop(host.name) for host in wanted if host.name in alive]
        for connection in alive.values():  # the hostfile names it no more
            connection.close()
        self._fleet.replace(listed)
        return listed

    def _repeat(self) -> None:
        while not self._over.wait(_RETRY_S if self._missing() == [] else _POLL_S):
            missing = self._missing()
            if missing:
                self._try(missing)

    def _missing(self) -> list[Host]:
        try:
            wanted = self._options.read()
        except PacelineError:  # being edited
            return []
        with self._lock:
            known = {c.host.name for c in self._fleet.hosts} | set(self._found)
        return [host for host in wanted if host.name not in known]

    def _try(self, hosts: Sequence[Host]) -> None:
        begun_s = time.monotonic()
        connections = [
            Connection(host, self._options, self._store_port) for host in self._ready(hosts)
        ]
        wait_for(connections)
        for connection in connections:
            if connection.lost or self._over.is_set():
                connection.close()
                continue
            with self._lock:
                self._found[connection.host.name] = connection
        self._over.wait(max(0.0, _RETRY_S - (time.monotonic() - begun_s)))


def launch_on_hosts(
    order: Order,
    options: HostsOptions,
    *,
    policy: Policy,
    ready: Callable[[Sequence[Host]], Sequence[Host]],
    check: Callable[[int], None],
    say: Callable[[str], None] = to_stderr,
) -> LaunchOutcome:
    """Run a function in every worker of all hosts.

    After a worker died, a host was lost or the infrastructure failed, all workers are started again
    on the hosts that are there, while the budget lasts. SIGINT, SIGTERM and SIGHUP stop all. When
    it returns, or this process is killed, nothing of it is left on any host. Call it in the main
    thread.

    Args:
        order: What to run.
        options: The hosts.
        policy: How often they are started again, and after how long they hang.
        ready: Makes hosts ready before they are connected (their Python, the code on them).
        check: Is given the number of workers over all hosts; raises UsageError where it won't do.
        say: Is told about restarts and hosts, a line each.

    Returns:
        How it ended. Failures of workers are in it, not raised.

    Raises:
        PacelineError: The training could not be started: a host is not there, or not as it should.
    """
    stopping = Stopping()
    with ExitStack() as stack:
        store = stack.enter_context(kept_store())
        interrupts = stack.enter_context(Interrupts().caught())
        try:
            with interrupts.starting():
                hosts = ready(options.read())
                fleet = stack.enter_context(connect(hosts, options, store.port))
                store.wait()
        except InterruptedStartError:
            return LaunchOutcome(results={}, interrupted=True, failures=(), restarts=0)
        interrupts.pass_on(stopping)
        if fleet.lost:
            raise InfrastructureError("\n".join(fleet.lost.values()))
        for line in clock_lines({c.host.name: c.clock_offset_s for c in fleet.hosts}):
            say(line)
        returning = stack.enter_context(Returning(fleet, options, ready, store.port).running())
        return _Attempts(order, options, fleet, returning, stopping).run(policy, check, say)


@final
class _Attempts:
    """The attempts of one launch, one after another."""

    def __init__(
        self,
        order: Order,
        options: HostsOptions,
        fleet: Fleet,
        returning: Returning,
        stopping: Stopping,
    ) -> None:
        self._order = order
        self._options = options
        self._fleet = fleet
        self._returning = returning
        self._stopping = stopping

    def run(
        self, policy: Policy, check: Callable[[int], None], say: Callable[[str], None]
    ) -> LaunchOutcome:
        """Attempt until it is done, stopped, or the budget is spent."""
        budget: RestartBudget | None = None
        attempt = 0
        while True:
            party = self._begin(attempt, check, say)
            if budget is None:
                budget = RestartBudget.full(policy.max_restarts, party.newest())
            results, failures = self._finish(party)
            done = LaunchOutcome(
                results=results,
                interrupted=self._stopping.stop,
                failures=failures,
                restarts=attempt,
            )
            if done.interrupted or not failures:
                return done
            step = party.newest()
            left = budget.spend(failures[0].kind, step, is_hang=failures[0].is_hang)
            if left is None:
                return done
            budget = left
            attempt += 1
            set_aside(self._order.run.logs, attempt - 1, failures)
            say(restart_line(failures[0], step, budget))
            self._returning.take_in(self._options.min_hosts, self._stopping, say)

    def _begin(
        self, attempt: int, check: Callable[[int], None], say: Callable[[str], None]
    ) -> Party:
        """Have the hosts look around, compare them, and start the workers."""
        hosts = self._fleet.hosts
        width = max(len(connection.host.name) for connection in hosts) if hosts else 0
        limits, run = self._order.hang, self._order.run
        oversight = None if limits is None else Oversight(limits, run, attempt, say)
        party = Party(self._order, attempt, show_line(width), self._stopping, oversight)
        try:
            party.look(hosts)
            lost = [member for member in party.members if member.lost]
            if lost and (attempt == 0 or len(hosts) - len(lost) < self._options.min_hosts):
                raise InfrastructureError("; ".join(member.lost for member in lost))
            party.drop_lost()
            problems = party.differing()
            if problems:
                raise JobError(
                    f"the hosts differ: {'; '.join(problems)}. All need the same code and versions "
                    "(--sync-code and --install bring them there)"
                )
            problem = party.reach()
            if problem:
                raise InfrastructureError(problem)
            check(party.workers)
            party.go()
        except BaseException:
            party.end()
            raise
        return party

    def _finish(self, party: Party) -> tuple[dict[int, str], tuple[WorkerFailure, ...]]:
        party.watch()
        results = party.results()
        if len(results) == party.workers:
            return results, ()
        return results, party.failures()
