"""Studies with invented but likely figures; each test changes what it is about."""

import json
import math
from pathlib import Path

Record = dict[str, object]

BASELINE = 39.55  # images a second of one worker
LINKS = {"allreduce": 0.168, "bf16": 0.056, "powersgd": 0.012}
"""Exposed communication: seconds a step for each doubling, by method."""


def spread(middle: float, share: float = 0.02) -> Record:
    return {"median": middle, "low": middle * (1 - share), "high": middle * (1 + share)}


def step_parts(workers: int, method: str) -> dict[str, float]:
    doublings = math.log2(workers)
    return {
        "data": 0.006,
        "forward": 0.263,
        "backward": 0.525,
        "exposed": LINKS[method] * doublings ** (1.4 if workers > 1 else 1),
        "waiting": 0.021 * doublings,
        "optimizer": 0.012,
        "other": 0.003,
    }


def curve_of(workers: int, epochs: int, epoch_s: float) -> list[Record]:
    rows: list[Record] = []
    for epoch in range(1, epochs + 1):
        learned = epoch * (1 - 0.05 * math.log2(workers))
        wiggle = 0.01 * math.sin(5.3 * epoch + workers)
        rows.append(
            {
                "time_s": epoch * epoch_s,
                "samples": epoch * 20800,
                "train_loss": 1.1 * math.exp(-learned / 5) + 0.21,
                "val_loss": 0.9 * math.exp(-learned / 4) + 0.352 + wiggle,
                "val_accuracy": 0.9 - 0.5 * math.exp(-learned / 4),
            }
        )
    return rows


def size_record(workers: int, method: str = "allreduce", *, train: bool = False) -> Record:
    parts = step_parts(workers, method)
    step_s = sum(parts.values())
    images_per_s = 32 * workers / step_s
    steps = 650 // workers
    fixed = {"evaluation_s": 9.4 / workers + 0.8, "snapshot_s": 1.7, "loader_start_s": 0.9}
    epoch_s = steps * step_s + sum(fixed.values())
    epochs = int(7200 // epoch_s)
    curve = curve_of(workers, epochs, epoch_s)
    trained = {
        "run_dir": f"trained/{workers}-{method}",
        "epochs": epochs,
        "stopped_because": "time",
        "train_time_s": 7200.0,
        "best_val_loss": min(float(str(row["val_loss"])) for row in curve),
        "best_val_accuracy": 0.88,
        "test_loss": 0.4351,
        "test_accuracy": 0.873,
        "curve": curve,
    }
    return {
        "workers": workers,
        "nodes": workers,
        "method": method,
        "method_options": {"powersgd_rank": 4} if method == "powersgd" else {},
        "global_batch": 32 * workers,
        "lr": 1e-4 * math.sqrt(workers),
        "steps_per_epoch": steps,
        "images_per_s": spread(images_per_s),
        "step_s": spread(step_s),
        "efficiency": spread(images_per_s / workers / BASELINE),
        "parts": parts,
        "epoch_s": epoch_s,
        "fixed": fixed,
        "wire_bytes_per_step": 558.6e6 * 2 * (workers - 1) / workers,
        "repeats": [
            {
                "run_dir": f"runs/{workers}-{method}-{n}",
                "images_per_s": images_per_s * (1 + 0.01 * (n - 2)),
                "step_s": step_s * (1 - 0.01 * (n - 2)),
                "problem": None,
            }
            for n in (1, 2, 3)
        ],
        "problem": None,
        "trained": trained if train else None,
    }


def prediction_record(methods: list[str], most: int = 64) -> Record:
    def size(workers: int, method: str) -> Record:
        efficiency = 0.809 / sum(step_parts(workers, method).values())
        return {
            "workers": workers,
            "nodes": workers,
            "efficiency": efficiency,
            "low": efficiency * 0.86,
            "high": min(efficiency * 1.1, 1.0),
            "images_per_s": efficiency * workers * BASELINE,
            "step_s": 0.809 / efficiency,
        }

    counts = [2**n for n in range(1, int(math.log2(most)) + 1)]
    return {
        "text": ["2 nodes pay, 8 don't with all-reduce; with powersgd rank 4 they do."],
        "link": {
            "bandwidth_bytes_per_s": 6.7e8,
            "round_trip_s": 5e-5,
            "source": "5.4 Gbit/s, which explains the study's own sizes; round-trip 50 µs",
        },
        "methods": [{"method": m, "sizes": [size(n, m) for n in counts]} for m in methods],
    }


def study_record(
    workers: tuple[int, ...] = (1, 2, 4, 8),
    methods: tuple[str, ...] = ("allreduce",),
    *,
    train: bool = False,
    predict: bool = False,
) -> Record:
    sizes = [
        size_record(n, method, train=train)
        for method in methods
        for n in workers
        if n > 1 or method == methods[0]
    ]
    return {
        "format": 1,
        "kind": "scale",
        "recipe": "vgg19",
        "command": ["paceline", "scale", "vgg19", "--workers", ",".join(map(str, workers))],
        "started_at": "2026-03-02T09:15:00+00:00",
        "paceline": "0.1.0",
        "versions": {"python": "3.11.7", "torch": "2.15.0"},
        "hosts": [f"node-{n + 1}" for n in range(max(workers))],
        "mode": "weak",
        "repeats": 3,
        "seconds": 20.0,
        "device": "cuda",
        "cores": 8,
        "baseline_images_per_s": BASELINE,
        "notes": ["8 workers share 2 cores: their compute is slower than on hosts of their own."],
        "sizes": sizes,
        "prediction": prediction_record(list(methods)) if predict else None,
    }


def write_study(directory: Path, record: Record) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "study.json").write_text(json.dumps(record))
    return directory
