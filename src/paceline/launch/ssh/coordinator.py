"""A training over several hosts, from its first connection to its last attempt."""

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import final

from paceline.errors import InfrastructureError
from paceline.launch.errors.error_records import set_aside
from paceline.launch.errors.failures import WorkerFailure
from paceline.launch.local.launcher import (
    LaunchOutcome,
    quietly,
    restart_line,
    to_stderr,
)
from paceline.launch.restart_policy import Policy, RestartBudget
from paceline.launch.signals import InterruptedStartError, Interrupts
from paceline.launch.ssh.attempt_coordinator import AttemptCoordinator
from paceline.launch.ssh.connection import ConnectionPool, connect
from paceline.launch.ssh.host_recovery import HostRecovery, MakeReady
from paceline.launch.ssh.launch_spec import LaunchSpec
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.ssh.participants import StopState, raise_first
from paceline.launch.ssh.rank_assignment import clock_lines
from paceline.launch.ssh.remote_watchdog import RemoteWatchdog
from paceline.launch.ssh.store import LauncherStore
from paceline.options.figures import plural

Settle = Callable[[str, int], str]


def launch_on_hosts(
    spec: LaunchSpec,
    options: HostsOptions,
    *,
    policy: Policy,
    ready: MakeReady,
    settle: Settle,
) -> LaunchOutcome:
    """Run a function in every worker of all hosts.

    After a worker died, a host was lost or the infrastructure failed, all workers are started again
    on the hosts that are there, while the budget lasts. SIGINT, SIGTERM and SIGHUP stop all. When
    it returns, or this process is killed, nothing of it is left on any host. Call it in the main
    thread.

    Args:
        policy: How often they are started again, and after how long they hang.
        ready: Makes hosts ready before they are connected (their Python, the code on them).
        settle: Is given the payload and the number of workers over all hosts; gives the payload of
            later attempts, and raises UsageError where that number won't do.

    Returns:
        How it ended. Failures of workers are in it, not raised.

    Raises:
        PacelineError: The training could not be started: a host is not there, or not as it should.
    """
    print_line = quietly(to_stderr)
    stop = StopState(print_line)
    with ExitStack() as stack:
        store = stack.enter_context(closing(LauncherStore()))
        # Connect. Until workers run, a signal breaks this off.
        interrupts = stack.enter_context(Interrupts(policy.stop).caught())
        try:
            with interrupts.starting():
                print_line(f"Connecting to {plural(len(options.read()), 'host')}")
                hosts = ready(options.read(), None)
                connections = stack.enter_context(connect(hosts, options, store.port))
                store.wait()
        except InterruptedStartError:
            return LaunchOutcome(results={}, interrupted=True, failures=(), restarts=0)
        # From here on a signal only sets flags, which the attempts poll.
        interrupts.pass_on(stop)
        if connections.lost:
            raise InfrastructureError("\n".join(connections.lost.values()))
        for line in clock_lines({c.host.name: c.clock_offset_s for c in connections.hosts}):
            print_line(line)
        # Train. Lost hosts are sought in the background meanwhile.
        recovery = stack.enter_context(
            HostRecovery(connections, options, ready, store.port).running()
        )
        attempts = _Attempts(spec, options, connections, recovery, stop)
        try:
            return attempts.run(policy, settle, print_line)
        except InterruptedStartError:
            return LaunchOutcome(results={}, interrupted=True, failures=(), restarts=0)


@final
class _Attempts:
    """The attempts of one launch, one after another."""

    def __init__(
        self,
        spec: LaunchSpec,
        options: HostsOptions,
        connections: ConnectionPool,
        recovery: HostRecovery,
        stop: StopState,
    ) -> None:
        self._spec = spec
        self._options = options
        self._connections = connections
        self._recovery = recovery
        self._stop = stop
        self._took_part: frozenset[str] = frozenset()
        """Hosts of the last attempt: newcomers have to fit them."""

    def run(
        self, policy: Policy, settle: Settle, print_line: Callable[[str], None]
    ) -> LaunchOutcome:
        """Attempt until it is done, stopped, or the budget is spent."""
        budget: RestartBudget | None = None
        attempt = restarts = 0
        while True:
            coordinator = self._gather(attempt, settle, print_line)
            if coordinator is None:  # too few hosts passed the checks: others may come
                attempt += 1
                self._recovery.rejoin(self._options.min_hosts, self._stop, print_line)
                continue
            # Counted from the progress at the first start, which the hosts have reported by now.
            if budget is None:
                budget = RestartBudget.full(policy.max_restarts, coordinator.newest())
            results, failures = self._finish(coordinator)
            done = LaunchOutcome(
                results=results,
                interrupted=self._stop.requested,
                failures=failures,
                restarts=restarts,
            )
            if done.interrupted or not failures:
                return done
            # Decide by the root cause and by the progress since the last restart.
            step = coordinator.newest()
            left = budget.after(failures[0], step)
            if left is None:
                return done
            budget = left
            # Restart, once enough hosts are there.
            set_aside(self._spec.run.logs, f"attempt-{attempt}")
            attempt += 1
            restarts += 1
            print_line(restart_line(failures[0], step, budget))
            self._recovery.rejoin(self._options.min_hosts, self._stop, print_line)

    def _gather(
        self, attempt: int, settle: Settle, print_line: Callable[[str], None]
    ) -> AttemptCoordinator | None:
        """Have the hosts report their facts, compare these, and start the workers.

        The first time everything has to be right; later a host that isn't is left out.

        Returns:
            None where too few hosts are left.
        """
        if self._stop.requested:
            raise InterruptedStartError
        hosts = self._connections.hosts
        width = max((len(connection.host.name) for connection in hosts), default=0)
        show, limits, run = _show_line(width), self._spec.hang, self._spec.run
        watchdog = None if limits is None else RemoteWatchdog(limits, run, attempt, print_line)
        coordinator = AttemptCoordinator(self._spec, attempt, show, self._stop, watchdog)
        try:
            # Look: all hosts at once.
            coordinator.inspect(hosts)
            # Check, each time among those that are left: who answered, who differs, who is reached.
            checks = (
                coordinator.problems,
                partial(coordinator.differing, self._took_part),
                coordinator.reach,
            )
            for check in checks:
                problems = check()
                if attempt == 0 or len(problems) == len(coordinator.members):
                    raise_first(problems)
                for name, problem in problems.items():
                    print_line(f"{name} is left out: {problem}")
                coordinator.drop(problems)
                if len(coordinator.members) < (1 if attempt == 0 else self._options.min_hosts):
                    coordinator.end()
                    return None
            # Settle what depends on the number of workers, then start them.
            if attempt == 0:
                coordinator.refuse_to_forget()
            self._spec = replace(
                self._spec, payload=settle(self._spec.payload, coordinator.workers)
            )
            coordinator.go()
        except BaseException:
            coordinator.end()
            raise
        self._took_part = frozenset(member.name for member in coordinator.members)
        return coordinator

    def _finish(
        self, coordinator: AttemptCoordinator
    ) -> tuple[dict[int, str], tuple[WorkerFailure, ...]]:
        coordinator.watch()
        results = coordinator.results()
        if len(results) == coordinator.workers:
            return results, ()
        return results, coordinator.failures()


def _show_line(width: int) -> Callable[[str, str, bool], None]:
    """Make what shows hosts' lines: each with its host's name before it.

    Args:
        width: Of the longest name.
    """

    def show(name: str, text: str, is_error: bool) -> None:
        """Print one line of a host to the stream that it came from."""
        stream = sys.stderr if is_error else sys.stdout
        with suppress(OSError):  # the terminal has gone, `| head` has left: training goes on
            print(f"{name:{width}} | {text}", file=stream, flush=True)

    return show
