"""What runs in every worker of `paceline run`: the user's script, as its own main program."""

import importlib
import json
import multiprocessing
import runpy
import sys
from pathlib import Path
from typing import Any

from paceline.distributed.environment import (
    AGENT_STORE_VARIABLE,
    REQUEST_VARIABLE,
    current_placement,
    read_environment,
    set_variables,
    store_file,
    thread_variables,
    without_variables,
)
from paceline.errors import InterruptedTraining, JobError
from paceline.options.text import fitting, print_stderr
from paceline.script.ending import RunDirectoryNamed, ended_with_its_block, has_opened
from paceline.training.config import TrainConfig, TrainRequest
from paceline.training.rng import seed_before_session
from paceline.training.worker import set_up_torch

_SPAWNED = (
    "{script} starts processes by torch.multiprocessing, in each worker that `paceline run` has "
    "started. If these are the training's workers, start it by `python {script}`; or leave them "
    "out: call the function once, with the session's rank, and without init_process_group"
)


def run_script(payload: str) -> str:
    """Run a script as `python SCRIPT ARGUMENTS` would, with its random numbers seeded.

    Returns:
        As `run_unseeded` does.

    Raises:
        JobError: The script ended itself with an exit code other than 0.
    """
    # A fork has Python's generator seeded anew, otherwise in every worker.
    seed_before_session(
        TrainConfig.from_settings(TrainRequest.from_json(payload).settings).loop.seed
    )
    return run_unseeded(payload)


def run_unseeded(payload: str) -> str:
    """Run a script as `python SCRIPT ARGUMENTS` would.

    Args:
        payload: A `TrainRequest` as JSON; `paceline.session()` in the script finds it. Its
            reference is the absolute path of a script, or a module's name.

    Returns:
        JSON with `stopped_because`: `signal`, or `script` where it came to its end; whether it has
        `met` the others in a process group; and, where it asks to be started again in a run
        directory that it names, `run_dir` and `resume` as it gives them.

    Raises:
        JobError: The script ended itself with an exit code other than 0.
    """
    # Fix threads and the rendezvous before the script's first line.
    request = TrainRequest.from_json(payload)
    set_variables({REQUEST_VARIABLE: payload})
    _pin(TrainConfig.from_settings(request.settings))
    if path := store_file(read_environment()):
        from paceline.distributed.rendezvous import meet_in_file

        meet_in_file(path)
    _tell_of_spawned(request.reference)
    # Workers are forked from a fork server and inherit its way: reader processes of the script's
    # DataLoaders would import the script anew instead of being forked, as elsewhere.
    multiprocessing.set_start_method(None, force=True)
    stopped = "script"
    try:
        with ended_with_its_block():
            _run_as_main(request)
    except RunDirectoryNamed as named:
        return json.dumps({"run_dir": named.run_dir, "resume": named.resume})
    except InterruptedTraining:
        stopped = "signal"
    except SystemExit as error:
        if error.code not in (None, 0):
            raise JobError(f"the script ended itself by sys.exit({error.code!r})") from error
    return json.dumps({"stopped_because": stopped, "met": _has_met()})


def _tell_of_spawned(script: str) -> None:
    """Say what to do where the script starts workers by `torch.multiprocessing` itself.

    They would wait for a store that torch's variable says the launcher keeps.
    """
    # The package has the function from the module, which has the package's name for `spawn`.
    places = [importlib.import_module(f"torch.multiprocessing{end}") for end in ("", ".spawn")]
    usual = places[0].start_processes

    def start(*given: Any, **named: Any) -> object:
        """Take what torch's own takes, and do as it does."""
        if current_placement().rank == 0:
            print_stderr(fitting(_SPAWNED.format(script=script), sys.stderr))
        with without_variables(AGENT_STORE_VARIABLE):
            return usual(*given, **named)

    for place in places:
        vars(place)["start_processes"] = start


def _has_met() -> bool:
    """Tell whether there was a session or a process group, which may be gone by now."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    # torch's name stays once a group was made.
    return has_opened() or getattr(module, "_default_pg_init_method", None) is not None


def _run_as_main(request: TrainRequest) -> None:
    """Run a file as `python SCRIPT ARGUMENTS` does, and a module as `python -m NAME ARGUMENTS`."""
    sys.argv = [request.reference, *request.script_args]
    if Path(request.reference).is_absolute():
        sys.path.insert(0, str(Path(request.reference).parent))
        runpy.run_path(request.reference, run_name="__main__")
    else:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(request.reference, run_name="__main__", alter_sys=True)


def _pin(config: TrainConfig) -> None:
    """Fix what bits depend on before the script's first line: it may build its model in it."""
    if config.data.shards is None or config.worker_threads is None:
        return
    set_variables(thread_variables(config.worker_threads))
    set_up_torch(config)
