"""What one training of a study showed, read from its run directory. Pure but for that.

What the study says follows from these `Measured` records alone, so that it can be resumed.
"""

import math
from collections.abc import Mapping

from paceline.errors import DataError, ExitCode, UsageError
from paceline.results.json_object import JsonObject, entries, number, section, texts, whole
from paceline.results.metrics_table import Metrics, read_metrics
from paceline.results.profile import StepProfile
from paceline.results.run_directory import RunDirectory
from paceline.results.study import CurvePoint, Measured, Trained
from paceline.scaling.plan import own_options

_SIGNAL = "signal"
"""Why a training is over that goes on when it is resumed."""
_NO_PROFILE = (
    "it left no profile of its steps. A script has to train by paceline.session(), and for longer "
    "than a few steps"
)
_OTHER_METHOD = (
    "the training combined its gradients by {own}, and {wanted} was to be measured: say --methods "
    "{own}, or leave the method out of the script"
)


def read_measured(run: RunDirectory, name: str, wall_s: float, method: str) -> Measured:
    """Read a measurement that has ended well.

    Args:
        method: The way of combining gradients that was to be measured.
    """
    try:
        profile = StepProfile.read(run.profile_json)
        description = run.read_run()
    except (DataError, UsageError) as error:
        missing = not run.profile_json.exists()
        problem = _NO_PROFILE if missing else str(error)
        return Measured(run_dir=name, exit_code=ExitCode.JOB, problem=problem, wall_s=wall_s)
    # A script may have overridden the method: its figures belong to another one.
    if profile.sync != method:
        problem = _OTHER_METHOD.format(own=profile.sync, wanted=method)
        return Measured(run_dir=name, exit_code=ExitCode.USAGE, problem=problem, wall_s=wall_s)
    derived, settings = section(description, "derived"), section(description, "settings")
    # A batch that the script set itself, not one that the study asked for.
    is_own = description.get("kind") == "script" and "global_batch" not in texts(
        description, "given"
    )
    cores = (whole(host, "cores") for host in entries(description, "hosts"))
    return Measured(
        run_dir=name,
        exit_code=ExitCode.DONE,
        wall_s=wall_s,
        profile=profile,
        images_per_s=profile.images_per_s,
        step_s=profile.step_s.median,
        lr=number(derived, "lr"),
        threads=whole(derived, "threads"),
        cores=min((count for count in cores if count is not None), default=None),
        script_batch=whole(settings, "global_batch") if is_own else None,
        versions={name: str(v) for name, v in section(description, "versions").items()},
        method_options=_method_options(method, settings),
    )


def _method_options(method: str, settings: Mapping[str, object]) -> dict[str, object]:
    """Take a method's own options; what makes a measurement short is none."""
    names = [name for name in own_options(method) if name != "sync_warmup_steps"]
    return {name: settings[name] for name in names if name in settings}


def read_whole(run: RunDirectory, name: str) -> Trained | None:
    """Read a training; None where it isn't over: a signal has ended it, or it left no summary."""
    try:
        summary = run.read_summary()
        derived = section(run.read_run(), "derived")
    except (OSError, ValueError, UsageError):
        return None
    if summary.get("stopped_because") == _SIGNAL:
        return None
    return Trained(
        run_dir=name,
        epochs=whole(summary, "epochs") or 0,
        stopped_because=str(summary.get("stopped_because")),
        train_time_s=number(summary, "train_time_s") or 0.0,
        best_val_loss=number(summary, "best_val_loss"),
        best_val_accuracy=number(summary, "best_val_accuracy"),
        test_loss=number(summary, "test_loss"),
        test_accuracy=number(summary, "test_accuracy"),
        curve=_curve(read_metrics(run.metrics_csv, []), derived),
    )


def _curve(metrics: Metrics, derived: JsonObject) -> tuple[CurvePoint, ...]:
    names = ("train_loss", "val_loss", "val_accuracy")
    losses = zip(*(metrics.column(name) for name in names), strict=True)
    places = zip(metrics.column("step"), metrics.column("time_s"), losses, strict=True)
    return tuple(
        CurvePoint(
            time_s=_finite(time_s) or 0.0,
            samples=_samples(int(step), derived),
            train_loss=_finite(train_loss),
            val_loss=_finite(val_loss),
            val_accuracy=_finite(val_accuracy),
        )
        for step, time_s, (train_loss, val_loss, val_accuracy) in places
        if math.isfinite(step)
    )


def _samples(step: int, derived: JsonObject) -> int:
    """Count the samples of so many steps: an epoch's last batch may be short."""
    batch, steps = whole(derived, "global_batch") or 0, whole(derived, "steps_per_epoch")
    if not steps:
        return step * batch
    return step // steps * (whole(derived, "train_samples") or 0) + step % steps * batch


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
