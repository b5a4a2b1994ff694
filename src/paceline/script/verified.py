"""What runs in every worker of `paceline verify`: the training, watched."""

import json
from contextlib import suppress
from pathlib import Path

from paceline.distributed.environment import current_placement, set_variables
from paceline.launch.heartbeat import note
from paceline.script.entry import run_script
from paceline.training.config import TrainRequest
from paceline.training.hooks.base import ADDED_HOOKS
from paceline.training.worker import run_training
from paceline.verify.events import Ended, EventWriter
from paceline.verify.file_isolation import writes_isolated
from paceline.verify.observer import Observer, SessionHook
from paceline.verify.script_hooks import watched
from paceline.verify.subprocesses import be_worker
from paceline.verify.trial import EnoughSeenError, Trial, record_path


def run_watched(payload: str) -> str:
    """Train as `paceline train` or `run` would, until enough was seen.

    Args:
        payload: A `Trial` as JSON.

    Returns:
        JSON with `stopped_because`.
    """
    trial = Trial.from_json(payload)
    request = TrainRequest.from_json(trial.request)
    if trial.on_cpu:
        set_variables({"CUDA_VISIBLE_DEVICES": ""})  # before the first use of CUDA here
    rank = current_placement().rank
    observer = Observer(trial, rank, EventWriter(record_path(Path(trial.records), rank)))
    # Install the observer's hooks in this context alone; `reset` takes them out again.
    be_worker()
    token = ADDED_HOOKS.set((SessionHook(observer),))
    is_cut = True
    try:
        with writes_isolated(trial), watched(observer), suppress(EnoughSeenError):
            run = run_training if request.kind == "recipe" else run_script
            run(trial.request)
            is_cut = False
    finally:
        ADDED_HOOKS.reset(token)
    # Only reached without an error: a trace that lacks this record was cut off by one.
    observer.writer.write(Ended(is_cut))
    note.operation = "end"
    return json.dumps({"stopped_because": "watched"})
