"""`--on skypilot`: a training on machines that SkyPilot rents, on whatever cloud."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from paceline.errors import ExitCode, UsageError
from paceline.launch.cluster import ClusterJob
from paceline.launch.node_command import label
from paceline.launch.scratch import scratch_directory
from paceline.launch.skypilot.options import SkypilotOptions
from paceline.launch.skypilot.task import EXIT_LINE, run_dir, task
from paceline.launch.stop_signals import StopRequestedError, StopRequests, stop_requests
from paceline.launch.yaml_text import to_yaml

_MOST_OF_A_NAME = 30
_CANCELLING_S = 300.0
_EXITED = re.compile(re.escape(EXIT_LINE) + r"(\d+)")
_BY_WEIGHT = (ExitCode.JOB, ExitCode.USAGE, ExitCode.INFRASTRUCTURE, ExitCode.RESUMABLE)


def submit(job: ClusterJob, options: SkypilotOptions) -> int:
    """Hand a training to SkyPilot, and follow it to its end. Blocks unless detached.

    Args:
        job: The training.
        options: Which machines to rent.

    Returns:
        Its exit code.

    Raises:
        UsageError: SkyPilot isn't installed, or something is missing.
    """
    own = secrets.token_hex(3)
    name = label(job.name, own, _MOST_OF_A_NAME)
    written = to_yaml(task(job, options, name, own))
    if job.dry_run:
        print(written, end="")
        return ExitCode.DONE
    sky = find_sky()
    with scratch_directory() as directory:
        path = directory / f"{name}.yaml"
        path.write_text(written)
        code = _launch(sky, job, options, name, path)
    if code == ExitCode.RESUMABLE:
        print(_how_to_resume(job, options), flush=True)
    return code


def launch_words(job: ClusterJob, options: SkypilotOptions, name: str, path: Path) -> list[str]:
    """Write SkyPilot's command after `sky`: a managed job where machines may be taken away."""
    words = ["jobs", "launch", "-n", name] if options.use_spot else ["launch", "-c", name]
    return [*words, "--yes", *(["--detach-run"] if job.detach else []), str(path)]


def cancel_words(options: SkypilotOptions, name: str) -> list[str]:
    """Write the command after `sky` that stops the training."""
    if options.use_spot:
        return ["jobs", "cancel", "--yes", "-n", name]
    return ["cancel", "--yes", "--all", name]


def exit_code(own: int, told: Iterable[int]) -> int:
    """Choose the exit code of a training.

    Args:
        own: Of the `sky` command.
        told: What the nodes printed, of all attempts.
    """
    if own == 0:
        return ExitCode.DONE
    codes = set(told)
    return next((int(code) for code in _BY_WEIGHT if code in codes), ExitCode.INFRASTRUCTURE)


def find_sky() -> str:
    """Find SkyPilot's command.

    Raises:
        UsageError: It isn't installed.
    """
    program = shutil.which("sky")
    if program is None:
        raise UsageError(
            "--on skypilot needs SkyPilot, whose command `sky` isn't on the PATH: pip install "
            "'skypilot[aws]' (or your cloud); or print the task file with --dry-run"
        )
    return program


def _launch(sky: str, job: ClusterJob, options: SkypilotOptions, name: str, path: Path) -> int:
    told: list[int] = []
    with stop_requests() as stop:
        process = subprocess.Popen(
            [sky, *launch_words(job, options, name, path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        try:
            _pass_on(process, told, stop)
            return exit_code(process.wait(), told)
        except StopRequestedError:
            return _stop([sky, *cancel_words(options, name)], options, name, stop)
        finally:
            _end(process)


def _pass_on(process: subprocess.Popen[bytes], told: list[int], stop: StopRequests) -> None:
    """Print what SkyPilot prints, and note the exit codes in it."""
    assert process.stdout is not None
    descriptor, line = process.stdout.fileno(), ""
    while True:
        stop.wait_for_output(descriptor)
        piece = os.read(descriptor, 65536).decode(errors="replace")
        sys.stdout.write(piece)
        sys.stdout.flush()
        *lines, line = (line + piece).split("\n")
        told += [int(found[1]) for text in lines if (found := _EXITED.search(text))]
        if not piece:
            return


def _stop(words: list[str], options: SkypilotOptions, name: str, stop: StopRequests) -> int:
    print(f"Stopping: sky {' '.join(words[1:])}", file=sys.stderr, flush=True)
    stop.again()
    try:
        if stop.run(words, _CANCELLING_S) == 0:
            return ExitCode.RESUMABLE
    except StopRequestedError:
        pass
    down = "jobs cancel -n" if options.use_spot else "down"
    print(
        f"paceline: it may still run, and cost. Look, and end it: sky {down} {name}",
        file=sys.stderr,
    )
    return ExitCode.INFRASTRUCTURE


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command that follows the output, if it still does; the training goes on or not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _how_to_resume(job: ClusterJob, options: SkypilotOptions) -> str:
    if options.keep_in is None:
        return "There was no --keep-in: the run directory is on the machines alone"
    return (
        "To go on from the newest snapshot, give the same command with --resume and "
        f"--run-dir {run_dir(job, options)}"
    )
