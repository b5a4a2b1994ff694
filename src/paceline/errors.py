"""Exceptions that a caller may want to catch, and the exit codes they end a command with."""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a `paceline` command ends; schedulers and scripts rely on these numbers."""

    DONE = 0
    USAGE = 2
    """Wrong usage: nothing was started."""
    JOB = 65
    """The user's code, data or settings are at fault: a retry would fail the same way."""
    INFRASTRUCTURE = 70
    """The world outside failed (a host, a link, a disk): worth a retry."""
    RESUMABLE = 75
    """Stopped early on purpose (signal, preemption); `paceline resume` goes on exactly."""


class PacelineError(Exception):
    """Base of all errors that Paceline raises on purpose; its message is meant for the user."""

    exit_code = ExitCode.INFRASTRUCTURE


class UsageError(PacelineError, ValueError):
    """An option, a name or a combination of them can't be right; nothing was started."""

    exit_code = ExitCode.USAGE


class JobError(PacelineError, ValueError):
    """The training itself can't go on: the user's code, data or settings are at fault."""

    exit_code = ExitCode.JOB


class DataError(JobError):
    """A data file is missing or damaged; the message names it and says where to get it."""


class NonFiniteLossError(JobError):
    """The loss became NaN or infinite; the message names step, rank and the batch's samples."""


class SnapshotError(PacelineError, RuntimeError):
    """A snapshot can't be read or doesn't fit: damaged, of an unknown format, of another model."""

    exit_code = ExitCode.JOB


class InfrastructureError(PacelineError, RuntimeError):
    """A host, a link, a port or a disk failed; a retry may well work."""


class StorageError(InfrastructureError):
    """The run directory can't be written: starting again there at once would fail the same way."""


class StoreError(InfrastructureError):
    """A place elsewhere failed, or keeps something else than what was sent."""


class InterruptedTraining(SystemExit):  # not an error: a wish, and the exit code for it
    """A signal asked the training to stop; its snapshot is saved. Ends the process with 75."""

    def __init__(self) -> None:
        super().__init__(int(ExitCode.RESUMABLE))


class HelpShown(Exception):  # noqa: N818  # not an error: the user asked for help
    """`--help` was given and has been printed: the command is over."""
