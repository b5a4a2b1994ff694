"""What the launcher has every host do, and what it keeps of what hosts write."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from paceline.files import read_json_object, read_plain, write_json
from paceline.launch.restart_policy import StopGrace
from paceline.launch.ssh.artifact_transfer import is_small
from paceline.launch.ssh.connection import Connection
from paceline.launch.ssh.protocol import Message
from paceline.launch.watchdog.hang_detector import HangLimits
from paceline.results.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What is the same for all hosts and attempts."""

    entry: str
    payload: str
    """Of the entry; `inspect` makes it fit the host."""
    inspect: str
    """`package.module:function`, run on each host: reports its facts and number of workers."""
    run: RunDirectory
    """The launcher's own."""
    run_dir: str
    """On the hosts: absolute, or relative to their working directories."""
    token: str
    """Name of a file in the launcher's run directory, by which hosts know it."""
    is_new: bool
    preload: tuple[str, ...]
    paths: tuple[str, ...]
    """Names of arguments in the payload that are paths."""
    home: Mapping[str, object]
    """Entries of `run.json` that hold this machine's paths; hosts have theirs in them."""
    stop: StopGrace = field(default_factory=StopGrace)
    """From a request to stop until workers are killed."""
    hang: HangLimits | None = None
    """After how long the training counts as hanging; None: no watchdog."""

    def message(self, connection: Connection, attempt: int) -> Message:
        """Write it for one host."""
        agent = connection.introduction
        return {
            "entry": self.entry,
            "payload": self.payload,
            "inspect": self.inspect,
            "run_dir": self.run_dir,
            "token": self.token,
            "is_new": self.is_new and attempt == 0,
            "preload": list(self.preload),
            "paths": list(self.paths),
            "stop": asdict(self.stop),
            "hang": None if self.hang is None else asdict(self.hang),
            "attempt": attempt,
            "workers": connection.host.slots,
            "address": connection.host.address,
            "ssh_address": agent.ssh_address if agent is not None else "",
        }

    def files(self, attempt: int) -> dict[str, str]:
        """Give what the launcher has of the run, for a host that leads it from now on."""
        if attempt == 0 and self.is_new:
            return {}
        run = self.run
        paths = [path for path in (run.run_json, run.metrics_csv) if path.exists()]
        paths += [run.steps_csv] if is_small(run.steps_csv) else []
        return {path.name: read_plain(path).decode() for path in paths}

    def restore_paths(self) -> None:
        """Put this machine's paths back into `run.json`, which a host has written."""
        with suppress(OSError, ValueError):
            content = read_json_object(self.run.run_json)
            if any(content.get(name) != value for name, value in self.home.items()):
                write_json(self.run.run_json, {**content, **self.home})
