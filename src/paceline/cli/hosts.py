"""Trains on hosts that ssh reaches: hands the request over, and says how it ended."""

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.elsewhere import words
from paceline.config.rundir import RunDirectory
from paceline.errors import InfrastructureError, PacelineError
from paceline.launch.hosts.hostfile import Host
from paceline.launch.hosts.options import HostsOptions
from paceline.trainer.request import TrainRequest

if TYPE_CHECKING:
    from paceline.cli.start import Launch

_INSPECT = "paceline.cli.hosting:inspect"


def start_on_hosts(launch: "Launch", options: HostsOptions) -> int:
    """Run a training on hosts to its end. Returns the exit code.

    Raises:
        PacelineError: It could not be started; the message names the host.
    """
    from paceline.cli.start import PRELOAD, announce, check_workers
    from paceline.launch.hosts.party import Order
    from paceline.launch.hosts.training import launch_on_hosts

    run, here, policy = launch.run, Path.cwd(), launch.config.policy()
    options.read()  # refuses before anything is made
    if launch.makes:
        run.create()
    with run.lock(), _token(run) as token:
        run.summary_json.unlink(missing_ok=True)  # of an earlier start
        for stale in run.logs.glob("*failure-rank-*.json"):
            stale.unlink(missing_ok=True)
        order = Order(
            entry=launch.entry,
            payload=_movable(launch, here).to_json(),
            inspect=_INSPECT,
            run=run,
            run_dir=_relative(str(run.path), here),
            token=token,
            is_new=launch.is_new,
            preload=PRELOAD,
            paths=launch.paths,
            hang=policy.hang,
        )
        try:
            outcome = launch_on_hosts(
                order,
                options,
                policy=policy,
                ready=partial(_made_ready, options=options, here=here),
                check=partial(check_workers, launch.config),
            )
        except InfrastructureError as error:
            print(f"paceline: {error}", file=sys.stderr, flush=True)
            _forget(run)
            return error.exit_code
        except PacelineError:
            _forget(run)
            raise
        return announce(run, outcome, _again(options))


def _again(options: HostsOptions) -> list[str]:
    """Write the options by which the same hosts are reached again."""
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    changed = {f.name: given[f.name] for f in fields(options) if given[f.name] != f.default}
    return words(changed)


def _made_ready(hosts: Sequence[Host], options: HostsOptions, here: Path) -> Sequence[Host]:
    """Settle each host's directory and Python; with `--sync-code` and `--install` bring them."""
    from paceline.launch.hosts.code import install, sync_code

    settled = [replace(host, directory=host.directory or _home(options, here)) for host in hosts]
    if options.sync_code:
        sync_code(settled, options, here)
    return install(settled, options) if options.install else settled


def _home(options: HostsOptions, here: Path) -> str:
    """Where a training runs on a host that has no directory of its own named."""
    return f"~/paceline/{here.name}" if options.sync_code else str(here)


def _movable(launch: "Launch", here: Path) -> TrainRequest:
    """Make paths below the working directory relative to it: the hosts' may be another one."""
    request = launch.request
    arguments = {
        name: _relative(str(value), here) if name in launch.paths else value
        for name, value in request.arguments.items()
    }
    reference = _relative(request.reference, here)
    return replace(request, reference=reference, arguments=arguments)


def _relative(path: str, here: Path) -> str:
    prefix = f"{here}/"
    return path.removeprefix(prefix)


@contextmanager
def _token(run: RunDirectory) -> Iterator[str]:
    """Put a file into the run directory, by which hosts see whether they share it."""
    token = run.path / f".launcher-{secrets.token_hex(16)}"
    token.touch()
    try:
        yield token.name
    finally:
        token.unlink(missing_ok=True)


def _forget(run: RunDirectory) -> None:
    """Leave nothing behind where nothing was trained."""
    if not run.run_json.exists():
        for token in run.path.glob(".launcher-*"):
            token.unlink()
        run.discard()
