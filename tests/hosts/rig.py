"""A network of hosts on this one machine, for tests of trainings over several hosts.

Each host is a set of namespaces: it has an address, a name, processes, a loopback interface, /run,
/dev/shm and /media of its own, knows the others by name (/etc/hosts), and runs an ssh server with a
host key of its own. Files elsewhere are shared, as on a cluster's file system. Besides the hosts
there are `client`, from which a user starts trainings, and `stranger`, which has nothing to do with
them; neither has an ssh server.

Links can be slowed, cut and healed; hosts can be killed, frozen, switched off and on.
Nothing has a name outside: no address, interface or file of the real machine is touched, two rigs
at once don't meet, and the kernel ends everything when the process that owns the rig is gone.
Needs Linux, root, util-linux, iproute2 and OpenSSH.
"""

import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from tests.hosts import sshd
from tests.hosts.machine import Machine
from tests.hosts.network import SUBNET, Network
from tests.launch.waiting import until

_LIMIT_S = 30.0
_FIRST_HOST, _CLIENT, _STRANGER = 10, 2, 3


class Rig:
    """Hosts `h0`, `h1`, ... and a client and a stranger; a context manager.

    Methods name a host by its number; those of links take any machine too.
    """

    def __init__(
        self, directory: Path, hosts: int, environments: Mapping[int, Mapping[str, str]]
    ) -> None:
        """Store what the rig is to be.

        Args:
            directory: For keys, configurations and logs.
            hosts: How many, from `h0` on.
            environments: What every process of a host finds in its environment, by host.
        """
        names = {f"h{n}": _FIRST_HOST + n for n in range(hosts)}
        names |= {"client": _CLIENT, "stranger": _STRANGER}
        self._directory = directory
        self._hosts_file = directory / "hosts"
        addresses = {name: f"{SUBNET}.{last}" for name, last in names.items()}
        self._lines = [f"{address} {name}\n" for name, address in addresses.items()]
        machines = {
            name: Machine(name, address, directory / name, self._hosts_file)
            for name, address in addresses.items()
        }
        self._hosts = [machines[f"h{n}"] for n in range(hosts)]
        for n, environment in environments.items():
            self._hosts[n].environment = environment
        self.client, self.stranger = machines["client"], machines["stranger"]
        switch = Machine("switch", "", directory / "switch", self._hosts_file)
        self._machines = [*self._hosts, self.client, self.stranger]
        self._switch = switch
        self._network = Network(switch)
        self.ssh_config = directory / "ssh_config"

    def __enter__(self) -> "Rig":
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def hosts(self) -> Sequence[Machine]:
        """All hosts, by number."""
        return self._hosts

    def host(self, n: int) -> Machine:
        """Give one host: its name, address, `popen` and `run`."""
        return self._hosts[n]

    def processes(self, n: int) -> list[psutil.Process]:
        """What runs on a host, ssh's server apart; numbered as outside."""
        return self._hosts[n].processes()

    def ssh(self, n: int) -> list[str]:
        """Give the words before a command that is to run on a host by ssh, for `client.run`."""
        return ["ssh", "-F", str(self.ssh_config), self._hosts[n].name]

    # Links: what is said of a machine's link holds for both directions.

    def cut(self, which: int | Machine) -> None:
        """Let nothing to or from a machine any more; neither side sees its link go down."""
        self._network.cut(self._port(which))

    def heal(self, which: int | Machine) -> None:
        """Undo `cut`."""
        self._network.heal(self._port(which))

    def rate(self, which: int | Machine, rate: str | None) -> None:
        """Limit a machine's link to a rate in tc's words, such as 200mbit; None: no limit."""
        self._network.rate(self._port(which), rate)

    # Hosts.

    def kill(self, n: int) -> None:
        """Kill every process of a host, its ssh server too; its link stays up and peers hear."""
        self._hosts[n].signal_all(signal.SIGKILL)
        self._hosts[n].wait_until_empty(_LIMIT_S)

    def power_off(self, n: int) -> None:
        """Switch a host off: its link is dead first, so that no peer is told."""
        self._network.unplug(n)
        self._hosts[n].switch_off()

    def power_on(self, n: int) -> None:
        """Start a host that was switched off or killed; returns once its ssh server answers."""
        host = self._hosts[n]
        if not host.is_on:
            host.switch_on()
            self._network.plug_in(n, host)
        sshd.start(host)
        until(partial(sshd.listens, host), _LIMIT_S)

    def freeze(self, n: int) -> None:
        """Stop every process of a host, as SIGSTOP does; its kernel goes on."""
        self._hosts[n].signal_all(signal.SIGSTOP)

    def thaw(self, n: int) -> None:
        """Undo `freeze`."""
        self._hosts[n].signal_all(signal.SIGCONT)

    def close(self) -> None:
        """End everything; returns when the last process is gone."""
        for machine in self._machines:
            machine.close()
        self._network.close()

    def _port(self, which: int | Machine) -> int:
        return which if isinstance(which, int) else self._machines.index(which)

    def _build(self) -> None:
        self._hosts_file.write_text("".join(["127.0.0.1 localhost\n", *self._lines]))
        for machine in (*self._machines, self._switch):
            machine.directory.mkdir()
        sshd.set_up(self._directory, self._hosts)
        self._network.switch_on()
        for port, machine in enumerate(self._machines):
            machine.switch_on()
            self._network.plug_in(port, machine)
        for host in self._hosts:
            sshd.start(host)
        for host in self._hosts:
            until(partial(sshd.listens, host), _LIMIT_S)
