"""`paceline track RUN_DIR`: shows a run at trackers, afterwards or while it runs."""

from collections.abc import Sequence

from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.metrics.options import MetricsOptions
from paceline.options.command_line import read_command
from paceline.options.fields import option_fields
from paceline.results.find_runs import RUN_OR_NAME, choose_run
from paceline.results.json_object import section, text, texts
from paceline.runtime.tracking import track
from paceline.tracking.registry import require_trackers

_ABOUT = (
    "Send a run to W&B, MLflow or another tracker, as train --tracker does: all of a training that "
    "is over, or what hadn't been sent; of one that runs, until it ends. "
    f"{RUN_OR_NAME}"
)
_OPTIONS = tuple(
    option
    for option in option_fields(MetricsOptions, "Output")
    if option.name in ("tracker", "tracker_project")
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    (where,), given = read_command(
        "paceline track RUN_DIR", _ABOUT, tokens, _OPTIONS, "the run directory"
    )
    run = choose_run(where)
    # What isn't given is as the training had it.
    settings = section(run.read_run(), "settings")
    names, project = given.get("tracker"), given.get("tracker_project")
    chosen = MetricsOptions(
        tracker=tuple(map(str, names)) if isinstance(names, tuple) else texts(settings, "tracker"),
        tracker_project=str(project) if project else text(settings, "tracker_project") or None,
    )
    if not chosen.tracker:
        raise UsageError("say where to: paceline track RUN_DIR --tracker wandb (or mlflow)")
    require_trackers(chosen.tracker)
    if late := track(run, chosen):
        raise InfrastructureError(
            f"{' and '.join(late)} didn't get everything: see {run.tracker_log}"
        )
    return ExitCode.DONE
