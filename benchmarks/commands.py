"""Runs whole commands, Paceline's and torchrun's, in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from paceline.launch.process_tree import die_with_parent

ROOT = Path(__file__).parents[1]
WORKERS = 2


def environment(*source: Path) -> Mapping[str, str]:
    """Give the environment of both sides: one thread each, this repository importable.

    Byte code is kept, as after an ordinary installation, even where this shell doesn't want that.

    Args:
        source: Further directories to import from, which come first.
    """
    places = (*map(str, source), str(ROOT), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, places))
    kept = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def train_command(recipe: str, run_dir: Path, **options: object) -> list[str]:
    """Write a `paceline train` command on two workers."""
    command = [str(Path(sys.executable).with_name("paceline")), "train", recipe]
    options = {"workers": WORKERS, "threads": 1, "progress": "plain", "run_dir": run_dir} | options
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def torchrun_command(*arguments: object) -> list[str]:
    """Write a torchrun command on two workers."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    run = [torchrun, "--standalone", f"--nproc-per-node={WORKERS}"]
    return [*run, *(str(argument) for argument in arguments)]


def ends_with_us() -> Callable[[], None]:
    """Give a `preexec_fn`: the command ends when this process does, by SIGKILL too.

    Else a benchmark that was killed would leave a training on the machine's GPUs.
    """
    return partial(die_with_parent, os.getpid())


def start(command: Sequence[str], output: Path, *source: Path) -> subprocess.Popen[bytes]:
    """Start a command; what it prints goes to a file.

    Args:
        command: Its words.
        output: The file.
        source: See `environment`.
    """
    env = environment(*source)
    with output.open("ab") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, env=env, preexec_fn=ends_with_us()
        )


def finish(process: subprocess.Popen[bytes], output: Path, timeout_s: float = 600.0) -> None:
    """Wait for a command.

    Raises:
        RuntimeError: It failed; the message ends with its output.
    """
    if process.wait(timeout_s):
        raise RuntimeError(f"{process.args!r} failed:\n{output.read_text()[-4000:]}")
