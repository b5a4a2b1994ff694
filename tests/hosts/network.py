"""The network between the machines of a rig: a switch, and a link to each machine."""

import subprocess
from collections.abc import Iterable

from tests.hosts.machine import Machine
from tests.launch.waiting import patient

SUBNET = "10.77.0"
_LIMIT_S = 30.0


class Network:
    """A switch that is a machine too, with port `p<n>` for the n-th machine on it.

    Rates are kept by the kernel (tbf, on both ends of a link).
    """

    def __init__(self, switch: Machine) -> None:
        self._switch = switch
        self._machines: dict[int, Machine] = {}
        self._rates: dict[int, str] = {}
        self._cut: set[int] = set()

    def switch_on(self) -> None:
        """Start the switch; nothing is plugged in yet."""
        self._switch.switch_on()
        _ip(
            self._switch,
            "link add br0 type bridge forward_delay 0 stp_state 0 mcast_snooping 0",
            "link set br0 addrgenmode none",
            "link set br0 up",
        )

    def plug_in(self, port: int, machine: Machine) -> None:
        """Give a machine that is on an interface `eth0`, its address, and a link to the switch."""
        self._machines[port] = machine
        self._cut.discard(port)
        # A host that comes back has its old hardware address, as its neighbours remember it.
        station = f"address 02:00:00:00:00:{port:02x}"
        _ip(
            self._switch,
            f"link add p{port} type veth peer name eth0 {station} netns {machine.init}",
            f"link set p{port} addrgenmode none",
            f"link set p{port} up",
        )
        _ip(machine, f"addr add {machine.address}/24 dev eth0", "link set eth0 up")
        if port in self._rates:
            self._set_rate(port, self._rates[port])
        self._join()

    def unplug(self, port: int) -> None:
        """Take a link away; frames under way are lost, and nobody is told."""
        self.cut(port)
        del self._machines[port]
        self._cut.discard(port)
        _ip(self._switch, f"link del p{port}")

    def cut(self, port: int) -> None:
        """Let nothing through a link any more, without a sign of it on either end."""
        self._cut.add(port)
        self._join()

    def heal(self, port: int) -> None:
        """Let everything through again."""
        self._cut.discard(port)
        self._join()

    def rate(self, port: int, rate: str | None) -> None:
        """Limit a link, both ways; None takes the limit away."""
        if port in self._rates and port in self._machines:
            _tc(self._switch, f"qdisc del dev p{port} root")
            _tc(self._machines[port], "qdisc del dev eth0 root")
        self._rates.pop(port, None)
        if rate is not None:
            self._rates[port] = rate
            if port in self._machines:
                self._set_rate(port, rate)

    def close(self) -> None:
        """End the switch and what runs on it."""
        self._switch.close()

    def _set_rate(self, port: int, rate: str) -> None:
        limit = f"root tbf rate {rate} burst 128kb latency 50ms"
        _tc(self._switch, f"qdisc add dev p{port} {limit}")
        _tc(self._machines[port], f"qdisc add dev eth0 {limit}")

    def _join(self) -> None:
        """Connect all ports that aren't cut."""
        places = {p: "nomaster" if p in self._cut else "master br0" for p in self._machines}
        _ip(self._switch, *(f"link set p{port} {place}" for port, place in places.items()))


def _ip(machine: Machine, *lines: str) -> None:
    _batch(machine, "ip", lines)


def _tc(machine: Machine, *lines: str) -> None:
    _batch(machine, "tc", lines)


def _batch(machine: Machine, tool: str, lines: Iterable[str]) -> None:
    # Only the network namespace: process ids in the lines are those outside.
    enter = ["nsenter", f"--net=/proc/{machine.init}/ns/net", tool, "-batch", "-"]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(
        enter, input=text, capture_output=True, text=True, timeout=patient(_LIMIT_S), check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{tool} on {machine.name} refused:\n{text}{done.stderr}")
