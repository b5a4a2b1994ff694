"""Trains on hosts that ssh reaches: hands the request over, and says how it ended."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, UsageError
from paceline.launch.errors.error_records import forget_failures
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.options.command_line import words
from paceline.results.run_directory import RunDirectory
from paceline.runtime.outcome import announce
from paceline.runtime.placement import check_workers
from paceline.runtime.run_dir_agreement import make_run
from paceline.runtime.spec import PRELOAD, Launch
from paceline.runtime.tracking import tracked
from paceline.training.config import TrainConfig, TrainRequest

if TYPE_CHECKING:
    from threading import Event

    from paceline.launch.local.launcher import LaunchOutcome

_INSPECT = "paceline.runtime.remote_entry:inspect"


def start_on_hosts(launch: Launch, options: HostsOptions) -> int:
    """Run a training on hosts to its end. Returns the exit code.

    Raises:
        PacelineError: It could not be started; the message names the host.
    """
    _check(launch, options)
    launch = make_run(launch)
    run = launch.run
    with run.lock(), tracked(run, launch.config.metrics, quiet=launch.quiet):
        run.remove_summary()
        forget_failures(run.logs)
        try:
            outcome = _launched(launch, options)
        except PacelineError:
            _forget(run)
            raise
        return announce(run, outcome, _again(options), quiet=launch.quiet)


def _check(launch: Launch, options: HostsOptions) -> None:
    """Refuse what can't be right before anything is made.

    Raises:
        UsageError: It can't.
    """
    hosts, dist = options.read(), launch.config.dist
    if options.min_hosts > len(hosts):
        raise UsageError(f"--min-hosts is {options.min_hosts}, and {len(hosts)} hosts are named")
    if launch.config.snapshots.copy_url is not None:
        raise UsageError(
            "--copy-to copies from the machine that starts the workers, and with --hosts snapshots "
            "are on the hosts, each of which has them all. Leave it out, or give --copy-to none"
        )
    if dist.rank is not None or dist.init_method is not None:
        raise UsageError(
            "--rank, --world-size and --init-method are for workers that you start by hand; with "
            "--hosts leave them out"
        )


def _launched(launch: Launch, options: HostsOptions) -> "LaunchOutcome":
    from paceline.launch.ssh.coordinator import launch_on_hosts
    from paceline.launch.ssh.launch_spec import LaunchSpec

    run, here, policy = launch.run, Path.cwd(), launch.config.policy()
    request = launch.request
    # A host that sees the token shares the launcher's run directory.
    with run.token() as token:
        spec = LaunchSpec(
            entry=launch.entry,
            payload=_movable(request, launch.paths, here).to_json(),
            inspect=_INSPECT,
            run=run,
            run_dir=_relative(str(run.path), here),
            token=token,
            is_new=launch.is_new,
            preload=PRELOAD,
            paths=launch.paths,
            home={
                "reference": request.reference,
                "recipe_arguments": dict(request.arguments),
            },
            stop=policy.stop,
            hang=policy.hang,
        )
        return launch_on_hosts(
            spec,
            options,
            policy=policy,
            ready=partial(_made_ready, options=options, here=here, run=run),
            settle=partial(_settled, launch.config),
        )


def _settled(config: TrainConfig, payload: str, workers: int) -> str:
    """Check the number of workers, and keep the global batch that it comes to for all attempts."""

    check_workers(config, workers)
    request = TrainRequest.from_json(payload)
    each = request.settings.get("batch_per_worker")
    if not isinstance(each, int):
        return payload
    # Later attempts may have fewer hosts: the global batch stays, each worker's share changes.
    batch = {"global_batch": each * workers, "batch_per_worker": None}
    return replace(request, settings={**request.settings, **batch}).to_json()


def _again(options: HostsOptions) -> list[str]:
    """Write the options by which the same hosts are reached again."""
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    changed = {f.name: given[f.name] for f in fields(options) if given[f.name] != f.default}
    return words(changed)


def _made_ready(
    hosts: Sequence[Host],
    stop: "Event | None",
    options: HostsOptions,
    here: Path,
    run: RunDirectory,
) -> Sequence[Host]:
    """Choose each host's directory and Python; copy code and install Paceline if asked to."""
    from paceline.launch.ssh.code_sync import install, sync_code

    settled = [replace(host, directory=host.directory or _home(options, here)) for host in hosts]
    if options.sync_code:
        kept = _relative(str(run.path), here)
        sync_code(settled, options, here, (kept,), stop)
    return install(settled, options, stop) if options.install else settled


def _home(options: HostsOptions, here: Path) -> str:
    """Where a training runs on a host that has no directory of its own named."""
    return f"~/paceline/{here.name}" if options.sync_code else str(here)


def _movable(request: TrainRequest, paths: Sequence[str], here: Path) -> TrainRequest:
    """Make paths below the working directory relative to it: the hosts' may be another one."""
    arguments = {
        name: _relative(str(value), here) if name in paths else value
        for name, value in request.arguments.items()
    }
    return replace(request, reference=_relative(request.reference, here), arguments=arguments)


def _relative(path: str, here: Path) -> str:
    return "." if path == str(here) else path.removeprefix(f"{here}/")


def _forget(run: RunDirectory) -> None:
    """Leave nothing behind where nothing was trained."""
    if not run.run_json.exists():
        run.discard()
