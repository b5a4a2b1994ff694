"""Where a run's time goes: bars of a step, of each worker and of an epoch, from `profile.json`."""

from dataclasses import asdict
from pathlib import Path

from paceline.errors import DataError
from paceline.options.figures import plural, show_seconds, show_whole_percent
from paceline.report.scaling.bars import Bar, BarPicture
from paceline.report.scaling.captions import FIXED_NAMES, PART_NAMES
from paceline.report.sections import Table
from paceline.results.profile import StepProfile, WorkerTime

MOST_WORKERS = 16
"""With more workers the slowest ones and the fastest are drawn, half of each."""
_DIFFERENT = 0.05
"""Workers differ by at least this share of a step where each has a bar of its own."""
_WORKER_NAMES = {"compute": "computing", "waiting": "waiting for others"}


def read_profile(path: Path, problems: list[str]) -> StepProfile | None:
    """Read a profile; None where there is none yet, or it is damaged.

    Args:
        problems: Gets a sentence where it can't be read.
    """
    if not path.exists():
        return None
    try:
        return StepProfile.read(path)
    except DataError as error:
        problems.append(str(error))
        return None


def time_pictures(profile: StepProfile) -> tuple[BarPicture, ...]:
    """Choose the pictures that a run has figures for: a step, its workers, an epoch."""
    found = (step_picture(profile), workers_picture(profile), epoch_picture(profile))
    return tuple(picture for picture in found if picture is not None)


def step_picture(profile: StepProfile) -> BarPicture:
    """Draw what the median step consists of, as a mean over the workers."""
    parts = asdict(profile.parts)
    whole_s = profile.step_s.median
    name = max(parts, key=lambda part: parts[part])
    share = show_whole_percent(parts[name] / whole_s)
    seen = f"{plural(profile.steps_seen, 'step')} looked at closely"
    return BarPicture(
        slug="step-time",
        title="Time of a step",
        caption=f"Most of it is {PART_NAMES[name]} ({share}); {seen}.",
        bars=(Bar(label="step", parts=parts, end=show_seconds(whole_s)),),
        names=PART_NAMES,
    )


def workers_picture(profile: StepProfile) -> BarPicture | None:
    """Draw how long each worker computes in a step; None where they hardly differ."""
    step_s = profile.step_s.median
    workers = sorted(profile.workers, key=lambda worker: worker.compute_s)
    if len(workers) < 2 or workers[-1].compute_s - workers[0].compute_s < _DIFFERENT * step_s:
        return None
    # Of many workers those at both ends.
    if len(workers) > MOST_WORKERS:
        workers = [*workers[: MOST_WORKERS // 2], *workers[-MOST_WORKERS // 2 :]]
        which = f"The {MOST_WORKERS // 2} fastest and slowest of {profile.world_size:,} workers"
    else:
        which = "Each worker"
    slowest = workers[-1]
    return BarPicture(
        slug="worker-time",
        title="Time of a step by worker",
        caption=f"{which}: what it computes, and how long it waits for others and for "
        f"communication. Rank {slowest.rank} on {slowest.host} computes longest.",
        bars=tuple(
            _worker_bar(worker, step_s) for worker in sorted(workers, key=lambda each: each.rank)
        ),
        names=_WORKER_NAMES,
    )


def epoch_picture(profile: StepProfile) -> BarPicture | None:
    """Draw what an epoch costs, its steps and the rest; None where that isn't known."""
    fixed = {name: value for name, value in asdict(profile.epoch).items() if value is not None}
    if not fixed or not profile.steps_per_epoch:
        return None
    parts = {"steps": profile.steps_per_epoch * profile.step_s.median, **fixed}
    whole_s = sum(parts.values())
    return BarPicture(
        slug="epoch-time",
        title="Time of an epoch",
        caption=f"{plural(profile.steps_per_epoch, 'step')} are "
        f"{show_whole_percent(parts['steps'] / whole_s)} of it.",
        bars=(Bar(label="epoch", parts=parts, end=show_seconds(whole_s)),),
        names={"steps": "steps", **FIXED_NAMES},
    )


def time_table(pictures: tuple[BarPicture, ...]) -> Table:
    """List the figures of the pictures: for each bar its parts, in time and as a share."""
    rows = []
    for picture in pictures:
        for bar in picture.bars:
            whole_s = sum(bar.parts.values()) or 1.0
            rows += [
                (bar.label, picture.names[name], show_seconds(part_s), _share(part_s, whole_s))
                for name, part_s in bar.parts.items()
            ]
    return Table(header=("of", "part", "time", "share"), rows=tuple(rows), figures_from=2)


def _share(part_s: float, whole_s: float) -> str:
    return show_whole_percent(part_s / whole_s)


def _worker_bar(worker: WorkerTime, step_s: float) -> Bar:
    # Its own median may be above that of whole steps.
    waits_s = max(step_s - worker.compute_s, 0.0)
    return Bar(
        label=f"rank {worker.rank}",
        parts={"compute": worker.compute_s, "waiting": waits_s},
        end=show_seconds(worker.compute_s),
    )
