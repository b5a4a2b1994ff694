"""The run directory: what one training leaves behind, and who may write into it."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Literal

from paceline.errors import UsageError
from paceline.files import (
    describe_json,
    read_json_object,
    read_plain,
    storing,
    why_unreadable,
    write_atomic,
    write_json,
)
from paceline.options.shell import command_line

USUAL_FOLDER = Path("runs")
"""Where run directories are that the user doesn't name, below the current directory."""

RUN_FORMAT = 1
"""The version of `run.json` that is written and read."""

_OF_EVERY_RUN = frozenset({"recipe", "settings", "derived"})
"""What every `run.json` has had, of which one at least tells it from a file of something else."""
_RUN_PARTS: Mapping[type, Sequence[str]] = {
    str: ("recipe", "reference", "started_at"),
    dict: ("recipe_arguments", "settings", "derived", "versions", "numerics", "placement"),
    list: ("script_args", "given", "hosts", "command", "history"),
}
_RUN_LISTS: Mapping[str, type] = {
    "script_args": str,
    "given": str,
    "command": str,
    "hosts": dict,
    "history": dict,
}
_IN_WORDS: Mapping[type, str] = {str: "text", dict: "an object", list: "a list"}
_LOCK_WAIT_S = 0.2
_MAKE_TRIES = 100
_SNAPSHOT = re.compile(r"step-([0-9]{12})")
_TOKEN = ".launcher-"


SampleUnit = Literal["images", "samples"]


def sample_unit(run: Mapping[str, object]) -> SampleUnit:
    """Say what a run's samples are called; of a run that doesn't say, by what was trained.

    Args:
        run: What `run.json` holds.
    """
    derived = run.get("derived")
    known = derived.get("sample_unit") if isinstance(derived, Mapping) else None
    if known not in ("images", "samples"):
        return "images" if run.get("kind", "recipe") == "recipe" else "samples"
    return "images" if known == "images" else "samples"


def log_path(log_dir: Path, rank: int) -> Path:
    """Name the log of one worker."""
    return log_dir / f"rank-{rank}.log"


def usual_name(name: str, moment: datetime) -> str:
    """Name the directory of a run: NAME-TIME, in local time."""
    return f"{fit_name(name)}-{moment.astimezone():%Y%m%d-%H%M%S}"


def fit_name(name: str) -> str:
    """Put a dash for what had better not stand in a directory's name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).lstrip(".")


_LEFT = re.compile(
    r"\.(run|summary|profile|copy|workers|tracker-.+|(.+-)?failure-rank-\d+)\.json\.[0-9a-f]{8}"
    r"|\.((metrics|steps)\.csv|report\.html)\.[0-9a-f]{8}|\.{1,2}probe-.+"
)
"""Names under which files are written before they get their own."""


@dataclass(frozen=True)
class RunDirectory:
    """Names of the files of one training; all paths follow from `path`."""

    path: Path
    shared: bool = field(default=False, compare=False)
    """Whether what is made may be read by others, as the umask says; else by its owner alone."""

    @staticmethod
    def named(path: str | Path) -> "RunDirectory":
        """Name a run directory by its absolute path, without `..`; `~` is the home directory."""
        whole = Path(path).expanduser().absolute()
        # What comes before `..` may be a link: where that leads, only the file system knows.
        return RunDirectory(Path(os.path.realpath(whole)) if ".." in whole.parts else whole)

    @staticmethod
    def usual(name: str, moment: datetime) -> "RunDirectory":
        """Name the run directory of a training that the user gave none: runs/NAME-TIME.

        Another one may have the same name: see `claim`.

        Args:
            name: Of the training; what can't stand in a directory's name becomes a dash.
        """
        return RunDirectory.named(USUAL_FOLDER / usual_name(name, moment))

    def claim(self, starter: str = "", *, again: bool = False) -> "RunDirectory":
        """Make a new directory for a training that has no other name: this one, or NAME-2, NAME-3.

        Making it settles whose it is: of several that begin at once, also on other machines, each
        gets another one. One process of a training calls it; the others learn the path.

        Args:
            starter: What starts the workers, where it may start them again after a failure.
            again: They have been started before: take the directory that was claimed then.

        Raises:
            UsageError: None can be made.
        """
        if again and (claimed := self.claimed_by(starter)):
            return claimed
        for run in self._numbered():
            try:
                _make_directory(run.path, run.directory_mode)
                if starter:
                    write_atomic(run._claim_file, starter.encode())
            except FileExistsError:
                continue
            except OSError as error:
                raise run._unwritable(error) from error
            return run
        raise AssertionError("names never end")

    def claimed_by(self, starter: str) -> "RunDirectory | None":
        """Give the newest directory of this name that a starter's first worker has claimed."""
        claimed = None
        for run in self._numbered():
            if not run.path.is_dir():
                return claimed
            with suppress(OSError, ValueError):
                if read_plain(run._claim_file) == starter.encode():
                    claimed = run
        return claimed

    def _numbered(self) -> Iterator["RunDirectory"]:
        yield self
        for number in count(2):
            yield replace(self, path=self.path.with_name(f"{self.path.name}-{number}"))

    @property
    def _claim_file(self) -> Path:
        return self.path / ".started-by"

    @property
    def run_json(self) -> Path:
        """Resolved settings, versions and hosts."""
        return self.path / "run.json"

    @property
    def metrics_csv(self) -> Path:
        """A row an epoch."""
        return self.path / "metrics.csv"

    @property
    def steps_csv(self) -> Path:
        """Rows within the epochs."""
        return self.path / "steps.csv"

    @property
    def summary_json(self) -> Path:
        """How the training ended; written last."""
        return self.path / "summary.json"

    def remove_summary(self) -> None:
        """Remove what an earlier start has left: the training hasn't ended.

        Raises:
            StorageError: The run directory can't be written.
        """
        with storing(self.path):
            self.summary_json.unlink(missing_ok=True)

    @property
    def profile_json(self) -> Path:
        """Where the time of a step goes; see `results/profile.py`."""
        return self.path / "profile.json"

    @property
    def copy_json(self) -> Path:
        """Where its copies are, with `--copy-to`; see `checkpoint/remote/record.py`."""
        return self.path / "copy.json"

    @property
    def snapshots(self) -> Path:
        """One directory per snapshot."""
        return self.path / "snapshots"

    @property
    def logs(self) -> Path:
        """`rank-<n>.log` and, where a worker failed, its error record."""
        return self.path / "logs"

    @property
    def tracker_log(self) -> Path:
        """What the processes that feed trackers have said."""
        return self.logs / "tracker.log"

    def tracker_json(self, name: str) -> Path:
        """Name the file that says which run of a tracker this is, and how much of it is there."""
        return self.path / f"tracker-{name}.json"

    @property
    def cluster(self) -> Path:
        """What was rendered for a cluster, and what its job prints."""
        return self.path / "cluster"

    @property
    def report_html(self) -> Path:
        """The run as one self-contained page."""
        return self.path / "report.html"

    @property
    def _lock_file(self) -> Path:
        return self.path / "run.lock"

    def rank_log(self, rank: int) -> Path:
        """What one worker printed."""
        return log_path(self.logs, rank)

    def create(self) -> None:
        """Make the directory for a new training and prove that it can be written.

        Raises:
            UsageError: It holds a training already, or can't be made or written.
        """
        self.check_new()
        self.make()

    def check_new(self) -> None:
        """Refuse a directory that a new training must not begin in; makes nothing.

        Raises:
            UsageError: It holds a training already or something else, or can't be read or made.
        """
        try:
            self.refuse_to_overwrite()
            if self.path.is_dir() and not self._is_leftover():
                raise UsageError(
                    f"{self.path} is not empty and holds no training. "
                    "Name a new or empty directory with --run-dir"
                )
            # What isn't there yet is made in the nearest directory that is.
            there = next(place for place in (self.path, *self.path.parents) if place.exists())
            if reason := _why_unwritable(there):
                raise OSError(reason, os.strerror(reason))
        except OSError as error:
            raise self._unwritable(error) from error

    def make(self) -> None:
        """Make the directory where it isn't there, and prove that it can be written.

        Raises:
            UsageError: It can't be made or written.
        """
        try:
            self.make_places()
            probe = self.logs / f".probe-{socket.gethostname()}-{os.getpid()}"
            write_json(probe, {})
            probe.unlink()
        except OSError as error:
            raise self._unwritable(error) from error

    @contextmanager
    def swept(self) -> Iterator[None]:
        """Remove what killed writers have left, before the block and after it.

        Only for the owner, around the workers' time: a worker writes under such names.
        """
        self._sweep()
        try:
            yield
        finally:
            self._sweep()

    def _sweep(self) -> None:
        for folder in (self.path, self.logs):
            with suppress(OSError):
                for path in list(folder.iterdir()):
                    if _LEFT.fullmatch(path.name) and path.is_file():
                        path.unlink(missing_ok=True)

    @property
    def directory_mode(self) -> int:
        """Permissions of a new directory, from which the umask takes away."""
        return 0o777 if self.shared else 0o700

    def make_places(self) -> None:
        """Make the directories where they aren't there; those that are keep their permissions.

        Raises:
            OSError: They can't be made.
        """
        for place in (self.path, self.snapshots, self.logs):
            _make_directory(place, self.directory_mode, exist_ok=True)

    @contextmanager
    def token(self) -> Iterator[str]:
        """Put a file into the directory by which others see whether they share it; give its name.

        It is removed after the block.
        """
        for stale in self.path.glob(f"{_TOKEN}*"):  # of one that was killed
            stale.unlink(missing_ok=True)
        path = self.path / f"{_TOKEN}{secrets.token_hex(16)}"
        path.touch()
        try:
            yield path.name
        finally:
            path.unlink(missing_ok=True)

    def newest_step(self) -> int:
        """Give the newest snapshot's step; -1 where there is none.

        Its manifest must say the same step, so that what merely has such a name doesn't count; it
        isn't verified here.
        """
        steps = (_SNAPSHOT.fullmatch(path.name) for path in self.snapshots.glob("step-*"))
        # Downwards: the first whose manifest is right is the newest.
        for step in sorted((int(match[1]) for match in steps if match), reverse=True):
            with suppress(OSError, ValueError):
                manifest = self.snapshots / f"step-{step:012d}" / "manifest.json"
                if read_json_object(manifest).get("step") == step:
                    return step
        return -1

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(
            f"the run directory {self.path} can't be written ({error.strerror}). "
            "Name another one with --run-dir"
        )

    def refuse_to_overwrite(self) -> None:
        """Refuse a directory that holds a training.

        Raises:
            UsageError: It does.
        """
        if self.run_json.exists():
            if self.is_locked():
                advice = " that is still running. Name another directory with --run-dir"
            else:
                resume = command_line("resume", self.path)
                advice = f". Resume it: {resume}; or name another directory with --run-dir"
            raise UsageError(f"{self.path} already holds a training{advice}")

    def _is_leftover(self) -> bool:
        """Tell whether nothing is here but what a training left that failed before it began."""
        # What a training makes before it begins, and names under which files are being written.
        ours = {self.snapshots.name, self.logs.name, self.cluster.name}
        ours |= {self._lock_file.name, self._claim_file.name, self.copy_json.name}
        if self._lock_file.exists():
            tables = (self.metrics_csv, self.steps_csv)  # begun before run.json is written
            ours |= {table.name for table in tables if _is_empty(table)}
        here = {
            path.name
            for path in self.path.iterdir()
            if not path.name.startswith(_TOKEN) and not _LEFT.fullmatch(path.name)
        }
        return here <= ours and not self._has_snapshots()

    def _has_snapshots(self) -> bool:
        return self.snapshots.is_dir() and any(self.snapshots.glob("*step-*"))

    def discard(self) -> None:
        """Remove what `create` made, of a training that failed before it began.

        Nothing where there are snapshots: that training had begun, and has lost its `run.json`.
        """
        if self._has_snapshots():
            return
        for directory in (self.snapshots, self.logs):
            shutil.rmtree(directory, ignore_errors=True)
        for file in (
            self._lock_file,
            self._claim_file,
            self.copy_json,
            *self.path.glob(f"{_TOKEN}*"),
        ):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: it holds something of the user's
            self.path.rmdir()
            if self.path.parent == USUAL_FOLDER.absolute():
                self.path.parent.rmdir()  # only while it is empty: see `_make_directory`

    def add_derived(self, **values: object) -> None:
        """Put what has come out in the course of a training under `derived` of its `run.json`.

        Args:
            values: By their names there. Nothing happens where there is no such file.
        """
        if self.run_json.exists():
            content = self.read_run()
            derived = content.get("derived")
            before = derived if isinstance(derived, Mapping) else {}
            write_json(self.run_json, {**content, "derived": {**before, **values}})

    def read_run(self) -> dict[str, object]:
        """Read `run.json`.

        Raises:
            UsageError: The directory holds no training, or `run.json` isn't readable.
        """
        try:
            content = read_json_object(self.run_json)
            _check_run(content)
        except FileNotFoundError:
            why = f"no {self.run_json.name}"
            if next(self.logs.glob("rank-*.log"), None):
                why += f"; what workers said before they had begun one is in {self.logs}"
            raise UsageError(f"{self.path} holds no training ({why})") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.run_json} can't be read: {why_unreadable(error)}") from error
        return content

    def is_described(self) -> bool:
        """Tell whether `run.json` is one that a training has written, of whatever version."""
        try:
            _refuse_foreign(read_json_object(self.run_json))
        except (OSError, ValueError):
            return False
        return True

    def read_summary(self) -> dict[str, object]:
        """Read `summary.json`.

        Raises:
            OSError: There is none, or it can't be read.
            ValueError: It holds something else; the message is a sentence without the path.
        """
        return read_json_object(self.summary_json)

    def is_locked(self) -> bool:
        """Tell whether a live training owns the directory."""
        try:
            descriptor = os.open(self._lock_file, os.O_RDONLY)
        except OSError:
            return False
        try:
            # A shared lock fails only while an owner holds the exclusive one.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Own the directory while a training runs; the kernel frees it when the owner dies.

        Raises:
            UsageError: Another live training owns it; the message says which process on which host.
        """
        try:
            # A flock belongs to the open file: the kernel frees it once no process has it open.
            descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(
                f"the run directory {self.path} can't be written ({error.strerror})"
            ) from error
        try:
            _lock(descriptor)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise UsageError(
                f"another training is running in {self.path} ({owner or 'owner unknown'})"
            ) from None
        try:
            # The owner's name, for whoever finds it locked; without a lock the text means nothing.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _make_directory(path: Path, mode: int, *, exist_ok: bool = False) -> None:
    """Make a directory and those above it.

    Another training that failed before it began may remove an empty runs/ meanwhile: made again.
    """
    for _ in range(_MAKE_TRIES):
        with suppress(FileNotFoundError):
            path.mkdir(mode, parents=True, exist_ok=exist_ok)
            return
    path.mkdir(mode, parents=True, exist_ok=exist_ok)


def _is_empty(table: Path) -> bool:
    """Tell whether a table is there and has a header alone."""
    try:
        with table.open("rb") as file:
            return file.readline().startswith(b"epoch,step,") and not file.read(1)
    except OSError:
        return False


def _refuse_foreign(content: Mapping[str, object]) -> None:
    """Refuse a file of this name that something else has written.

    Raises:
        ValueError: It is none of ours.
    """
    if not content.keys() & _OF_EVERY_RUN:
        names = ", ".join(sorted(_OF_EVERY_RUN))
        raise ValueError(f"no training has written it: it has none of {names}")


def _check_run(content: Mapping[str, object]) -> None:
    """Check the parts of a `run.json` that are there.

    Raises:
        ValueError: It is none of ours or of another format, or a part isn't of the type that it
            should be.
    """
    _refuse_foreign(content)
    if content.get("format", RUN_FORMAT) != RUN_FORMAT:
        actual = describe_json(content["format"])
        raise ValueError(f"it has format {actual}, and this Paceline reads {RUN_FORMAT}")
    if content.get("kind", "recipe") not in ("recipe", "script"):
        raise ValueError(f"kind is {describe_json(content['kind'])}; it is recipe or script")
    # Each part that is there has its type; lists have it in each item.
    for kind, names in _RUN_PARTS.items():
        for name in names:
            value = content.get(name, kind())
            if not isinstance(value, kind):
                raise ValueError(
                    f"{name} is {describe_json(value)}; it should be {_IN_WORDS[kind]}"
                )
    for name, kind in _RUN_LISTS.items():
        items = content.get(name, [])
        assert isinstance(items, list)  # checked above
        for item in items:
            if not isinstance(item, kind):
                raise ValueError(
                    f"{name} holds {describe_json(item)}; it should be a list, "
                    f"each {_IN_WORDS[kind]}"
                )


def _lock(descriptor: int) -> None:
    """Lock a file, over a moment: whoever asks whether it is locked holds it as long."""
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return


def _why_unwritable(place: Path) -> int:
    """Say by an error number why nothing can be made in a place; 0 where it can."""
    if not place.is_dir():
        return errno.ENOTDIR
    if os.access(place, os.W_OK | os.X_OK):
        return 0
    is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
    return errno.EROFS if is_read_only else errno.EACCES
