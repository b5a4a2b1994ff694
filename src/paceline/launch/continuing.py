"""Starts a training on a node of a cluster, or resumes it where this job has started it before.

Run in the node's container as `python3 -P -m paceline.launch.continuing`; becomes `paceline`.
Clusters start a failed or preempted node's command again as it is, without saying so.
"""

import argparse
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from paceline.errors import ExitCode
from paceline.files import read_json_object, write_json
from paceline.results.run_directory import RunDirectory

_NODE_VARIABLES = ("JOB_COMPLETION_INDEX", "PET_NODE_RANK", "SKYPILOT_NODE_RANK", "PACELINE_NODE")
_HOST_VARIABLES = ("PET_MASTER_ADDR",)
WAIT_FOR_HOST_S = 300.0
_POLL_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Replace this process by the training's command. Returns an exit code only where that failed.

    Args:
        argv: Options of this program, `--`, and the words of the `paceline` command.
    """
    signal.signal(signal.SIGTERM, _leave)  # process 1 of a container ignores it otherwise
    at = argv.index("--")  # a script's own arguments follow a second one
    options, command = _parser().parse_args(list(argv[:at])), list(argv[at + 1 :])
    host = next((os.environ[name] for name in _HOST_VARIABLES if name in os.environ), options.host)
    # Wait for rank 0's host: it may start later than this one.
    if host and not wait_for_host(host, options.wait_s):
        print(
            f"paceline: the host of rank 0, {host}, has no address after {options.wait_s:g} s",
            file=sys.stderr,
        )
        return ExitCode.INFRASTRUCTURE
    # Count this start, among those without a newer snapshot since.
    node = next((os.environ[name] for name in _NODE_VARIABLES if name in os.environ), "0")
    run = Path(options.run_dir)
    mark = run / "logs" / f"{options.submission}-node-{node}.started"
    starts = note_start(mark, run, shared=options.shared)
    has_run = (run / "run.json").exists()
    if options.max_restarts is not None and starts > options.max_restarts + 1:
        print(
            f"paceline: this node was started {starts - 1} times in a row without a newer snapshot",
            file=sys.stderr,
        )
        return ExitCode.JOB
    # A restart continues the run; this process becomes the training, which so gets its signals.
    if has_run and (starts > 1 or options.resume):
        command = resuming(command, options.run_dir)
        print(f"Going on with what was begun: paceline {shlex.join(command)}", flush=True)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "paceline", *command])


def note_start(mark: Path, run: Path, *, shared: bool = False) -> int:
    """Note that this node of this submission starts. Returns how often, without a newer snapshot.

    The mark says that the node was started before; that workers then met, `run.json` says. A run
    directory that another training has filled is so left to `paceline train`, which refuses it.

    Args:
        mark: A file among the run's logs.
        shared: Whether others may read it.
    """
    before, known = _read_mark(mark)
    newest = RunDirectory(run).newest_step()
    starts = 2 if before and newest > known else before + 1
    try:
        RunDirectory(run, shared=shared).make_places()
        write_json(mark, {"starts": starts, "step": newest})
    except OSError:
        pass  # the training says what is wrong with the directory
    return starts


def _read_mark(mark: Path) -> tuple[int, int]:
    try:
        content = read_json_object(mark)
    except (OSError, ValueError):
        return 0, -1
    starts, step = content.get("starts"), content.get("step")
    return (starts, step) if type(starts) is int and type(step) is int else (0, -1)


def resuming(command: Sequence[str], run_dir: str) -> list[str]:
    """Turn `train RECIPE ...` or `run SCRIPT ...` into the command that resumes it.

    Its options stay: `paceline resume` refuses those that would change what is trained.

    Args:
        command: The words after `paceline`; the options after the recipe's or script's name.
    """
    options = list(command[2:])
    if "--" in options:  # a script's own arguments, which the run directory knows
        del options[options.index("--") :]
    return ["resume", run_dir, *without_option(options, "--run-dir")]


def without_option(command: Sequence[str], flag: str) -> list[str]:
    """Take an option with its value out of a command line."""
    kept: list[str] = []
    skip = False
    for word in command:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return kept


def wait_for_host(host: str, wait_s: float) -> bool:
    """Wait until a host's name has an address: a cluster's names come with its containers."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(min(_POLL_S, wait_s / 10))
        else:
            return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paceline.launch.continuing", allow_abbrev=False)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--submission", required=True)
    parser.add_argument("--host", default="", help="Rank 0's host, where no variable says it.")
    parser.add_argument("--max-restarts", type=int, help="Without a newer snapshot.")
    parser.add_argument("--shared", action="store_true", help="Others may read the run directory.")
    parser.add_argument("--resume", action="store_true", help="Also what others had begun.")
    parser.add_argument("--wait-s", type=float, default=WAIT_FOR_HOST_S)
    return parser


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(int(ExitCode.RESUMABLE))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
