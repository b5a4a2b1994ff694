"""Writes the commands that a study of scaling runs: ordinary trainings, each of one size."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from paceline.errors import UsageError
from paceline.files import writing
from paceline.gradient_sync.options import SyncMethod
from paceline.launch.ssh.hostfile import Host, hostfile_line
from paceline.launch.ssh.options import HostsOptions
from paceline.options.command_line import GivenOptions, flag, note, words
from paceline.options.fields import OptionValue, option_fields, pick
from paceline.options.text import printable
from paceline.scaling.options import METHODS, PLAIN
from paceline.scaling.plan import (
    ENDED_FROM_OUTSIDE,
    Size,
    first_slots,
    method_settings,
)
from paceline.scaling.study_directory import remove_snapshots

HOSTS = tuple(o for o in option_fields(HostsOptions, "Hosts") if o.name != "min_hosts")
"""Options of the hosts that a study runs on: all of them, or it would be another size."""
ONLY_TRAINED = (
    "epochs",
    "time_budget",
    "target_accuracy",
    "patience",
    "early_stopping",
    "best_by",
)
"""Options that say when a whole training ends and which model it keeps."""
_MANY_EPOCHS = 1_000_000
_ENDLESS: Mapping[str, OptionValue] = {
    "epochs": _MANY_EPOCHS,
    "target_accuracy": None,
    "early_stopping": None,
}
"""A measurement ends by its time alone, whatever the recipe says."""


def idle_without_training(given: Iterable[str], *, is_script: bool) -> Mapping[str, str]:
    """List options that say when a whole training ends, where none is trained.

    Args:
        given: Names of options of the training.
        is_script: It is a script's training, whose epochs may be short.

    Returns:
        By name, why it has no effect.
    """
    ends = [name for name in ONLY_TRAINED if not (is_script and name == "epochs")]
    why = "has no effect without --train: a measurement lasts --seconds"
    return {name: why for name in given if name in ends}


def without_idle(given: GivenOptions, idle: Mapping[str, str]) -> dict[str, OptionValue]:
    """Refuse options without effect.

    A file may be for `paceline train` as well: those that stand there are left out, and named.

    Args:
        idle: By name, why it has no effect.

    Returns:
        The others.

    Raises:
        UsageError: One was typed, or is in the environment.
    """
    in_file = given.of_file()
    for name, why in idle.items():
        if name not in in_file:
            raise UsageError(f"{flag(name)} {why}")
        note(f"{given.sources[name]}: {flag(name).lstrip('-')} {why}")
    return {name: value for name, value in given.values.items() if name not in idle}


@final
@dataclass(frozen=True, kw_only=True)
class StudyHosts:
    """Where a study runs, and how that is reached."""

    listed: tuple[Host, ...] = ()
    """None: here."""
    given: Mapping[str, OptionValue] = field(default_factory=dict)
    """Options that name them, and how they are reached."""

    @classmethod
    def split_from(cls, given: dict[str, OptionValue]) -> "StudyHosts":
        """Read options of hosts, and take them out of those that were given.

        Raises:
            UsageError: They name no host, or can't be read.
        """
        own = {option.name: given.pop(option.name) for option in HOSTS if option.name in given}
        hosts = pick(HostsOptions, own).read()
        if own and not hosts:
            raise UsageError(f"{flag(next(iter(own)))} has no effect without --hosts")
        return cls(listed=hosts, given=own)

    @property
    def slots(self) -> int:
        """How many workers they take."""
        return sum(host.slots or 1 for host in self.listed)

    @property
    def reaching(self) -> Mapping[str, OptionValue]:
        """Options of how they are reached."""
        return {n: v for n, v in self.given.items() if n not in ("hosts", "hostfile")}


@final
@dataclass(frozen=True, kw_only=True)
class StudyCommands:
    """The commands of one study."""

    target: str
    """Recipe or script, as the user names it."""
    is_script: bool
    given: Mapping[str, OptionValue]
    """Options of training and the recipe's own arguments, but for those that make the size."""
    methods: Mapping[str, OptionValue]
    """Options of ways of combining gradients."""
    names_method: bool
    """Whether the way of combining gradients is said at all: else it is the script's own."""
    hosts: StudyHosts
    hostfiles: Path
    """Directory for a hostfile a size."""
    seconds: float
    script_args: Sequence[str] = ()

    def measure(self, size: Size, run_dir: Path, batch: int | None) -> Sequence[str]:
        """Write the command of a measurement.

        Args:
            batch: The global batch; None: as the script has it.
        """
        ends = {n: v for n, v in self.given.items() if n not in ONLY_TRAINED}
        if self.is_script:
            ends |= {"epochs": self.given["epochs"]} if "epochs" in self.given else {}
        else:
            ends |= {**_ENDLESS, "progress": "off"}
        if size.method not in ENDED_FROM_OUTSIDE:
            ends["time_budget"] = str(self.seconds)
        elif not self.is_script:
            ends["time_budget"] = None
        ends["max_restarts"] = 0
        return self._start(size, run_dir, batch, ends, warm=True)

    def train(self, size: Size, run_dir: Path, batch: int | None) -> Sequence[str]:
        """Write the command of a whole training; arguments as for `measure`."""
        return self._start(size, run_dir, batch, self.given, warm=False)

    def resume(self, size: Size, run_dir: Path) -> Sequence[str]:
        """Write the command that goes on with a whole training."""
        return ["resume", str(run_dir), *self._where(size)]

    def remove_snapshots(self, size: Size, run_dir: Path) -> None:
        """Remove a measurement's snapshots from the hosts; arguments as for `measure`."""
        if self.hosts.listed:
            hosts = first_slots(self.hosts.listed, size.workers)
            remove_snapshots(hosts, pick(HostsOptions, self.hosts.reaching), run_dir, Path.cwd())

    def _start(
        self,
        size: Size,
        run_dir: Path,
        batch: int | None,
        settings: Mapping[str, OptionValue],
        *,
        warm: bool,
    ) -> Sequence[str]:
        own = {n: v for n, v in settings.items() if n not in ("global_batch", "batch_per_worker")}
        if batch is not None and not fills(self.script_args):
            own["global_batch"] = batch
        if self.names_method:
            own |= method_settings(size.method, self.methods, warm=warm)
        command = ["run" if self.is_script else "train", self.target, "--run-dir", str(run_dir)]
        command += [*self._where(size), *spelled(own)]
        if self.script_args:
            command += ["--", *(filled(word, size, batch) for word in self.script_args)]
        return command

    def _where(self, size: Size) -> Sequence[str]:
        if not self.hosts.listed:
            return ["--workers", str(size.workers), "--on", "local"]
        path = self.hostfiles / f"{size.workers}.txt"
        hosts = first_slots(self.hosts.listed, size.workers)
        with writing(path):
            self.hostfiles.mkdir(exist_ok=True)
            path.write_text("".join(f"{hostfile_line(host)}\n" for host in hosts))
        # A host that is lost must not be done without: it would be another size.
        return [
            "--hostfile",
            str(path),
            "--min-hosts",
            str(len(hosts)),
            *spelled(self.hosts.reaching),
        ]


def with_options(tokens: Sequence[str], more: Sequence[str]) -> list[str]:
    """Add options to a command's words, before the arguments of its script."""
    end = tokens.index("--") if "--" in tokens else len(tokens)
    return [*tokens[:end], *more, *tokens[end:]]


def print_line(line: str) -> None:
    """Print how far a study is; nobody may be listening any more."""
    with suppress(BrokenPipeError):
        print(printable(line), flush=True)


def spelled(settings: Mapping[str, OptionValue]) -> list[str]:
    """Write options as the words of a command line; None as the word that stands for it."""
    listed: list[str] = []
    for name, value in settings.items():
        listed += [flag(name), "none"] if value is None else words({name: value})
    return listed


def fills(script_args: Iterable[str]) -> bool:
    """Tell whether the script's own arguments have a place for the global batch."""
    return any("{global_batch}" in word for word in script_args)


def filled(word: str, size: Size, batch: int | None) -> str:
    """Put a size into an argument of the script."""
    return word.replace("{workers}", str(size.workers)).replace("{global_batch}", str(batch))


def usual_method(given: Mapping[str, OptionValue], recipe: Mapping[str, OptionValue]) -> SyncMethod:
    """Name the way of combining gradients where nobody says which to measure."""
    if given.get("shards") is not None:
        return "ordered"
    own = recipe.get("sync")
    return next((method for method in METHODS if method == own), PLAIN)
