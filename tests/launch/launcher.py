"""A launcher process for tests that signal or kill it.

Run as: python launcher.py ENTRY PAYLOAD LOG_DIR OUTCOME STOP_S
"""

import json
import sys
from pathlib import Path

from paceline.launch import signals
from paceline.launch.local import forkserver
from paceline.launch.local.launcher import launch_local
from paceline.launch.restart_policy import Policy, StopGrace

if __name__ == "__main__":
    entry, payload, log_dir, outcome_file, stop_s = sys.argv[1:]
    signals.SAME_S = 0.0  # tests press twice without a pause
    forkserver.prepare(["entries"], 1)
    outcome = launch_local(
        f"entries:{entry}",
        payload,
        workers=2,
        threads=1,
        policy=Policy(stop=StopGrace(least_s=float(stop_s), most_s=float(stop_s))),
        log_dir=Path(log_dir),
        progress=lambda: -1,
    )
    summary = {
        "results": outcome.results,
        "interrupted": outcome.interrupted,
        "failures": [failure.to_json() for failure in outcome.failures],
    }
    Path(outcome_file).write_text(json.dumps(summary))
