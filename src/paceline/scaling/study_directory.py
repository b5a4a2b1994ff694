"""The directory of a study: what is in it, whether it can be resumed, and what is removed from it
and from other hosts at the end."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import final

from paceline.errors import InfrastructureError, UsageError
from paceline.files import why_unreadable, write_atomic, write_json, writing
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.ssh.parallel_commands import Commands, on_each
from paceline.launch.ssh.ssh import plain_ssh_command
from paceline.options.fields import flag
from paceline.results.run_directory import RunDirectory
from paceline.results.study import STUDY_JSON, Measured, Study, require_study
from paceline.scaling.options import parse_methods
from paceline.scaling.plan import METHOD_OPTIONS, Size, first_slots, own_options
from paceline.scaling.table import as_csv

OF_TRAINED = "options of --train"
"""What settles whole trainings; a study can go on with them and without."""
_OF_STUDY = ("measured", "runs", "logs", "hosts", "trained", "run.lock")
_NAME = re.compile(r"([1-9][0-9]*)-([a-z0-9]+)-([1-9][0-9]*)")


@final
@dataclass(frozen=True)
class StudyDirectory:
    """Names of the files of one study; all paths follow from `path`."""

    path: Path

    @staticmethod
    def of(path: str | None, name: str) -> "StudyDirectory":
        """Name a study's directory.

        Args:
            path: As the user says; None: runs/NAME-TIME.
            name: Of the study, fit for a directory's name.
        """
        if path is not None:
            return StudyDirectory(RunDirectory.named(path).path)
        return StudyDirectory(RunDirectory.usual(name, datetime.now(UTC)).path)

    @property
    def study_json(self) -> Path:
        """All that was found; written after each measurement."""
        return self.path / STUDY_JSON

    @property
    def study_csv(self) -> Path:
        """A row for each size and method."""
        return self.path / "study.csv"

    def prepare(
        self, requested: Mapping[str, object], methods: Sequence[str] = (), *, shared: bool = False
    ) -> bool:
        """Make the directory, or see that it holds the same study. Returns whether that is new.

        Args:
            shared: Whether others may read it.

        Raises:
            UsageError: It holds something else, or can't be made.
        """
        run = RunDirectory(self.path, shared=shared)
        try:
            if self.study_json.exists():
                self._compare(requested, methods)
                return False
            if self.path.is_dir() and any(self.path.iterdir()):
                raise UsageError(
                    f"{self.path} is not empty and holds no study. Name a new or empty directory "
                    "with --study-dir"
                )
            run.path.mkdir(run.directory_mode, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the directory {self.path} can't be used ({error.strerror}). Name another one "
                "with --study-dir"
            ) from error
        return True

    def lock(self) -> AbstractContextManager[None]:
        """Own the directory while a study runs.

        Raises:
            UsageError: Another live study owns it.
        """
        return RunDirectory(self.path).lock()

    def begun(self, study: Study) -> Study:
        """Take over from the study that is gone on with, if there is one: since when, and what."""
        if not self.study_json.exists():
            return study
        before = self._read()
        now = {name: value for name, value in study.asked.items() if value is not None}
        return replace(study, started_at=before.started_at, asked={**before.asked, **now})

    def write(self, study: Study) -> None:
        """Write what is known by now.

        Raises:
            UsageError: The directory can't be written.
            StorageError: The disk is full.
        """
        with writing(self.path):
            write_json(self.study_json, study.to_json())
            write_atomic(self.study_csv, as_csv(study).encode())

    def sizes_besides(self, requested: Sequence[Size], hosts: Sequence[Host]) -> tuple[Size, ...]:
        """List the sizes that are requested, and those that were measured before, by workers.

        Args:
            requested: The smallest first.
            hosts: Where they run.
        """
        sizes = list(requested)
        for match in self._measured():
            workers, (method, *_) = int(match[1]), parse_methods(match[2])
            known = {(size.workers, size.method) for size in sizes}
            if (workers, method) not in known:
                nodes = len(first_slots(hosts, workers)) or 1
                sizes.append(Size(workers=workers, nodes=nodes, method=method))
        return tuple(sorted(sizes, key=lambda size: size.workers))

    def rounds(self, least: int) -> int:
        """Count the rounds that were measured, or are to be."""
        return max([least, *(int(match[3]) for match in self._measured())])

    def discard(self, *, keep: bool) -> None:
        """Remove the files of a new study; one of which something was measured stays as it is.

        Args:
            keep: The directory itself, since it was there before.
        """
        records = (Measured.read(path) for path in (self.path / "measured").glob("*.json"))
        if any(record is not None and record.problem is None for record in records):
            return
        for path in (self.study_json, self.study_csv, *(self.path / name for name in _OF_STUDY)):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not keep:
            with suppress(OSError):  # something else has come there
                self.path.rmdir()

    def _measured(self) -> list[re.Match[str]]:
        names = (path.stem for path in sorted((self.path / "measured").glob("*.json")))
        return [match for match in map(_NAME.fullmatch, names) if match is not None]

    def _read(self) -> Study:
        try:
            return require_study(self.path, settings=True)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.study_json} can't be resumed: {why_unreadable(error)}"
            ) from error

    def _compare(self, requested: Mapping[str, object], methods: Sequence[str]) -> None:
        """Refuse to go on with another study.

        Raises:
            UsageError: It is one; the message names the first thing that differs.
        """
        before = self._read().asked
        measured = {match[2] for match in self._measured()}
        # Options of methods that haven't been measured yet may change.
        known = {name for method in measured & {*methods} for name in own_options(method)}
        free = {flag(name) for name in {*METHOD_OPTIONS} - known}
        for name in sorted({*before, *requested} - free):
            if name == OF_TRAINED and None in (before.get(name), requested.get(name)):
                continue
            if before.get(name) != requested.get(name):
                then, now = (_describe_option(name, o.get(name)) for o in (before, requested))
                raise UsageError(
                    f"{self.path} holds a study with {then}, and now there is {now}: its figures "
                    "couldn't be compared. Give the same options, or another --study-dir"
                )


def _describe_option(name: str, value: object) -> str:
    return f"no {name}" if value in (None, [], "") else f"{name} {value}"


_TIMEOUT_S = 30.0


def remove_snapshots(
    hosts: Sequence[Host], options: HostsOptions, run_dir: Path, here: Path
) -> None:
    """Remove a measurement's snapshots from the hosts. Blocks; a host that fails keeps them.

    Args:
        run_dir: The measurement's, on this machine.
        here: Working directory of the command.
    """

    def work(host: Host, commands: Commands) -> None:
        """Remove them from one host; a failure is passed over."""
        command = removal_command(host, options, run_dir, here)
        with suppress(OSError, subprocess.TimeoutExpired):
            commands.run(command, _TIMEOUT_S)

    with suppress(InfrastructureError):
        on_each(hosts, work)


def removal_command(host: Host, options: HostsOptions, run_dir: Path, here: Path) -> list[str]:
    """Write the ssh command for one host; arguments as for `remove_snapshots`. Pure."""
    place = run_dir / "snapshots"
    if place.is_relative_to(here):
        usual = f"~/paceline/{here.name}" if options.sync_code else str(here)
        place = Path(host.directory or usual) / place.relative_to(here)
    text = str(place)
    path = f'"$HOME"{shlex.quote(text[1:])}' if text.startswith("~/") else shlex.quote(text)
    return [*plain_ssh_command(host, options), "--", host.name, f"rm -rf -- {path}"]
