"""What runs in every worker of `paceline verify`: the training, watched."""

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from paceline.distributed.environment import current_placement, set_variables
from paceline.errors import ExitCode
from paceline.launch.errors.error_records import exit_code_of, kind_of, run_guarded
from paceline.launch.heartbeat import note
from paceline.launch.process_tree import die_with_parent
from paceline.script.entry import run_script, run_unseeded
from paceline.training.config import TrainRequest
from paceline.training.hooks.observer import OBSERVER
from paceline.training.worker import run_training
from paceline.verify.events import Ended, EventWriter
from paceline.verify.isolation.confinement import confine
from paceline.verify.isolation.project_copy import ProjectCopy
from paceline.verify.observing.observer import Observer
from paceline.verify.observing.script_hooks import watched
from paceline.verify.observing.session import SessionWatch
from paceline.verify.trial import EnoughSeenError, PassCutError, Trial, record_path

_LIBRARIES = (
    ("Lightning", "lightning.pytorch"),
    ("Lightning", "pytorch_lightning"),
    ("Lightning", "lightning.fabric"),
    ("Transformers", "transformers.trainer"),
    ("Accelerate", "accelerate.accelerator"),
)
"""Those that train for a script, by a module that is there where it uses them."""


def run_watched(payload: str) -> str:
    """Train as `paceline train` or `run` would, until enough was seen.

    Returns:
        JSON with `stopped_because`, and whether the training was `cut` off.
    """
    return _watch(payload, run_script)


def _watch_unseeded(payload: str) -> str:
    """Train as a launching command of the user's own would, which seeds nothing."""
    return _watch(payload, run_unseeded)


def _watch(payload: str, run_script: Callable[[str], str]) -> str:
    """Train until enough was seen.

    Returns:
        JSON with `stopped_because`, and whether the training was `cut` off.
    """
    trial = Trial.from_json(payload)
    request = TrainRequest.from_json(trial.request)
    set_variables(trial.variables)
    if trial.on_cpu:
        set_variables({"CUDA_VISIBLE_DEVICES": ""})  # before the first use of CUDA here
    rank = current_placement().rank
    if trial.copy:
        confine(trial)
        reference = ProjectCopy(trial.project, trial.copy).path_in_copy(request.reference)
        request = replace(request, reference=reference)
    observer = Observer(trial, rank, EventWriter(record_path(Path(trial.records), rank)))
    token = OBSERVER.set(SessionWatch(observer))
    is_cut = True
    try:
        with watched(observer), suppress(EnoughSeenError, PassCutError):
            run = run_training if request.kind == "recipe" else run_script
            run(request.to_json())
            is_cut = False
    finally:
        OBSERVER.reset(token)
    # Only reached without an error: a trace that lacks this record was cut off by one.
    libraries = tuple(name for name, module in _LIBRARIES if module in sys.modules)
    observer.writer.write(Ended(is_cut, str(torch.__version__), libraries))
    note.operation = "end"
    return json.dumps({"stopped_because": "watched", "cut": is_cut})


def main(argv: Sequence[str]) -> None:
    """Run a worker that the user's own launching command has started, in place of the script.

    Args:
        argv: What torch.distributed.launch adds for the script, its local rank; a trial's file.
    """
    die_with_parent(os.getppid())
    *local, file = argv
    trial = Trial.from_json(Path(file).read_text())
    request = TrainRequest.from_json(trial.request)
    request = replace(request, script_args=(*local, *request.script_args))
    trial = replace(trial, request=request.to_json())
    try:
        rank, log_dir = current_placement().rank, Path(trial.log_dir)
        ended = run_guarded(_watch_unseeded, trial.to_json(), log_dir, rank)
    except BaseException as error:  # noqa: BLE001 - the process ends here, with a record
        # At once, without clean-up: its peers notice it at once as well.
        os._exit(exit_code_of(kind_of(error)))
    if not json.loads(ended)["cut"]:
        _finish_script()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the interpreter's end: threads of process groups that are there still abort a process
    # now and then, in which torch waits for Python's lock while Python goes away.
    os._exit(ExitCode.DONE)


def _finish_script() -> None:
    """Do what a script has left for its own end, in the interpreter's order."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for its threads
    atexit._run_exitfuncs()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working directory, where `-m` has looked for this module
    main(sys.argv[1:])
