"""Measurements made by hand, for tests of studies."""

from pathlib import Path

from paceline.gradient_sync.options import SyncMethod
from paceline.results.profile import (
    Arrival,
    EpochCosts,
    Spread,
    StepParts,
    StepProfile,
    WorkerTime,
)
from paceline.results.study import CurvePoint, Measured, Study, Trained
from paceline.scaling.options import PLAIN
from paceline.scaling.plan import Size
from paceline.scaling.result import summarise


def size(workers: int, method: SyncMethod = PLAIN, nodes: int | None = None) -> Size:
    return Size(workers=workers, nodes=nodes or workers, method=method)


def profile(
    workers: int, step_s: float, *, sync: str = PLAIN, batch: int = 32, steps_seen: int = 30
) -> StepProfile:
    """A step of which 0.8 s are computed, and the rest is exposed."""
    parts = StepParts(
        data=0.01,
        forward=0.25,
        backward=0.5,
        exposed=max(0.0, step_s - 0.8),
        waiting=0.0,
        optimizer=0.03,
        other=0.01,
    )
    return StepProfile(
        world_size=workers,
        nodes=workers,
        sync=sync,
        device="cpu",
        global_batch=batch * workers,
        steps_per_epoch=-(-20800 // (batch * workers)),
        steps_seen=steps_seen,
        step_s=Spread(median=step_s, low=step_s, high=step_s),
        images_per_s=batch * workers / step_s,
        parts=parts,
        workers=tuple(
            WorkerTime(rank=rank, host=f"node{rank}", compute_s=0.8, spread_s=0.01)
            for rank in range(workers)
        ),
        gradients=(Arrival(at_s=0.1, bytes=4000),),
        gradient_bytes=4000,
        parameter_bytes=4000,
        wire_bytes_per_step=8000.0 * (workers - 1) / workers,
        epoch=EpochCosts(evaluation_s=4.0, snapshot_s=0.5),
    )


def measured(
    workers: int,
    step_s: float,
    *,
    number: int = 1,
    sync: str = PLAIN,
    threads: int = 1,
    cores: int = 8,
    steps_seen: int = 30,
) -> Measured:
    made = profile(workers, step_s, sync=sync, steps_seen=steps_seen)
    return Measured(
        run_dir=f"runs/{workers}-{sync}-{number}",
        exit_code=0,
        wall_s=30.0,
        profile=made,
        images_per_s=made.images_per_s,
        step_s=step_s,
        lr=1e-4 * workers**0.5,
        threads=threads,
        cores=cores,
        versions={"torch": "2.15.0"},
    )


def failed(workers: int, problem: str, exit_code: int = 65, sync: str = PLAIN) -> Measured:
    return Measured(run_dir=f"runs/{workers}-{sync}-1", exit_code=exit_code, problem=problem)


TRAINED = Trained(
    run_dir="trained/1-allreduce",
    epochs=14,
    stopped_because="time",
    train_time_s=7200.0,
    best_val_loss=0.3795,
    best_val_accuracy=0.88,
    test_loss=0.4485,
    test_accuracy=0.869,
    curve=(
        CurvePoint(time_s=525.6, samples=20800, train_loss=1.0, val_loss=0.5, val_accuracy=0.8),
    ),
)

ASKED = Study(
    recipe="imagefolder-vgg19",
    command=("paceline", "scale", "imagefolder-vgg19"),
    started_at="2026-01-01T00:00:00+00:00",
    paceline="0.1.0",
    hosts=("node0", "node1"),
    mode="weak",
    repeats=3,
    seconds=20.0,
    asked={"--mode": "weak"},
)


def ec2_like() -> Study:
    """One method, four sizes, the efficiencies of the study on EC2, trained on one node."""
    steps = {1: 0.8, 2: 0.988, 4: 1.231, 8: 1.739}
    found = {
        size(n): [measured(n, step_s * f, number=i) for i, f in enumerate((1.0, 1.02, 1.01), 1)]
        for n, step_s in steps.items()
    }
    return summarise(ASKED, list(found), found, {}, {size(1): TRAINED})


def keep_record(place: Path, record: Measured) -> None:
    (place / "measured").mkdir(parents=True, exist_ok=True)
    record.write(place / "measured" / f"{Path(record.run_dir).name}.json")
