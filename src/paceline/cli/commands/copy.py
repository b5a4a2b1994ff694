"""`paceline copy`: a run to a place elsewhere, as `--copy-to` does in a training, or from there."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from paceline.checkpoint.options import SnapshotOptions
from paceline.checkpoint.remote.url import check_url, is_url, reason_of
from paceline.cli.target import file_name
from paceline.errors import ExitCode, PacelineError, StoreError, UsageError
from paceline.options.command_line import note, read_command
from paceline.options.shell import command_line
from paceline.options.text import fitting, printable
from paceline.results.find_runs import choose_run
from paceline.results.json_object import section, whole
from paceline.results.run_directory import USUAL_FOLDER, RunDirectory

_USAGE = "paceline copy FROM [TO]"
_ABOUT = (
    "Copy a run. From a run directory to a place below the URL TO, as --copy-to does while it "
    "trains; without TO to where it was copied before, what isn't there yet. From the URL of a "
    "run's copies into the run directory TO, runs/RUN by default; `paceline resume URL` does that "
    "and resumes. Bytes are verified by SHA-256."
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    what = "the run directory, or the URL of a run's copies"
    (source, *rest), _ = read_command(_USAGE, _ABOUT, tokens, (), what, "TO")
    target = rest[0] if rest else None
    if is_url(source):
        _, run = fetch(source, target)
        line = printable(f"Resume it: {command_line('resume', run.path)}")
        print(fitting(line, sys.stdout))
    else:
        _copy(source, target)
    return ExitCode.DONE


def fetch(url: str, where: str | None) -> tuple[str, RunDirectory]:
    """Fetch a run from its copies into a new run directory; nothing is left where that fails.

    A run directory that has been copied there itself is taken as it is.

    Args:
        where: The run directory; None for runs/RUN.

    Returns:
        The URL without a slash at its end, and the run directory.

    Raises:
        UsageError: There is no run, or the directory isn't new.
        InfrastructureError: The store failed, or no snapshot is whole.
    """
    url = check_url(url, "the run's URL")
    usual = USUAL_FOLDER / file_name(url.rpartition("/")[2])
    run = RunDirectory.named(where if where is not None else usual)
    from paceline.checkpoint.remote.record import CopyRecord

    here = CopyRecord.read(run) if run.run_json.exists() else None
    if here is not None and here.url == url:
        note(f"{run.path} is the run that is copied to {url}: nothing is fetched")
        return url, run
    from paceline.checkpoint.remote.fetch import fetch_run  # imports torch
    from paceline.checkpoint.remote.store import open_store

    store = open_store(url)
    with _in_words(f"{url} can't be fetched"):
        fetch_run(url, store, run, note)
    return url, run


def _copy(source: str, target: str | None) -> None:
    run = choose_run(source)
    from paceline.checkpoint.remote.copier import RunCopier
    from paceline.checkpoint.remote.process import note_in_summary
    from paceline.checkpoint.remote.record import CopyRecord
    from paceline.checkpoint.remote.store import open_store

    settings = section(run.read_run(), "settings")
    record = before = CopyRecord.read(run)
    if target is not None:
        record = CopyRecord.for_run(run, check_url(target, "TO"))
    if record is None:
        raise UsageError(f"{run.path} was never copied: say where to, {_USAGE}")
    keep_last = whole(settings, "keep_last") or SnapshotOptions().keep_last
    with run.lock():
        record.write(run)
        copier = None
        try:
            with _in_words(f"copying to {record.url} failed"):
                claiming = RunCopier(run, open_store(record.url), record, keep_last)
                claiming.claim()
                copier = claiming
                copier.copy()
                copier.record = replace(copier.record, complete=True)
                note_in_summary(run, copier.record)
                copier.copy_summary()
        finally:
            # A place that couldn't be claimed isn't where `resume` copies on to.
            (copier.record if copier else before or record).write(run)
    print(fitting(printable(f"Copied to {record.url}"), sys.stdout))


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Turn whatever a store's library raises in the block into an error without secrets."""
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:  # noqa: BLE001  # a store's library may raise anything
        raise StoreError(f"{what}: {reason_of(error)}") from None
