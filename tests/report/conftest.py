"""A run directory with invented but likely numbers; each test changes what it is about."""

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.results.metrics_table import EpochRow
from paceline.results.run_directory import RunDirectory

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

STEPS_PER_EPOCH = 23
COLUMNS = tuple(field.name for field in fields(EpochRow))


def metrics_row(epoch: int, epochs: int) -> dict[str, object]:
    """One epoch of a training that learns, with a little deterministic noise."""
    share = epoch / epochs
    noise = math.sin(epoch * 12.9898) * 0.5 + math.sin(epoch * 4.1414) * 0.5
    return {
        "epoch": epoch,
        "step": epoch * STEPS_PER_EPOCH,
        "time_s": round(1.31 * epoch + 0.05 * noise, 3),
        "train_loss": 1.9 * math.exp(-5 * share) + 0.05 + 0.01 * noise,
        "train_accuracy": 1 - 0.7 * math.exp(-5 * share) - 0.012 + 0.002 * noise,
        "train_top5_accuracy": 1 - 0.2 * math.exp(-5 * share),
        "val_loss": 1.5 * math.exp(-6 * share) + 0.08 + 0.015 * noise,
        "val_accuracy": 1 - 0.6 * math.exp(-9 * share) - 0.014 + 0.003 * noise,
        "val_top5_accuracy": 1 - 0.15 * math.exp(-6 * share),
        "lr": 0.2 * 0.5 * (1 + math.cos(math.pi * share)),
        "images_per_s": 10950 + 300 * noise,
        "batch_time_s": 0.0061 + 0.0003 * noise,
        "data_time_s": 0.0009 + 0.0001 * noise,
    }


def write_metrics(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def describe_run(epochs: int) -> dict[str, object]:
    return {
        "format": 1,
        "paceline": "0.1.0",
        "recipe": "digits",
        "recipe_arguments": {"width": 32, "dropout": 0.25},
        "settings": {
            "epochs": epochs,
            "global_batch": 64,
            "optimizer": "sgd",
            "lr": 0.2,
            "schedule": "cosine",
            "momentum": 0.9,
            "betas": None,
            "target_accuracy": 0.975,
            "patience": 1,
            "early_stopping": None,
            "time_budget": None,
            "precision": "fp32",
            "compile": False,
            "workers": 2,
            "seed": 1,
        },
        "given": ["lr", "epochs", "workers"],
        "derived": {
            "world_size": 2,
            "nodes": 1,
            "shards": 2,
            "global_batch": 64,
            "batch_per_worker": [32, 32],
            "micro_batches": 1,
            "lr": 0.2,
            "lr_rule": "0.2 (as given, not scaled)",
            "memory_format": "channels_last",
            "precision": "fp32",
            "device": "cpu",
            "backend": "gloo",
            "threads": 1,
            "steps_per_epoch": STEPS_PER_EPOCH,
            "train_samples": 1437,
            "val_samples": 360,
            "parameters": 73418,
            "optimizer": "SGD(momentum=0.9, nesterov=True)",
        },
        "git": {"commit": "1a2b3c4d5e6f" + 28 * "0", "dirty": True},
        "versions": {"python": "3.11.7", "torch": "2.15.0", "numpy": "2.4.0", "paceline": "0.1.0"},
        "hosts": [
            {
                "host": "node-1",
                "ranks": [0, 1],
                "device": "cpu",
                "cpu": "Example CPU at 2.4 GHz",
                "cores": 2,
            }
        ],
        "command": ["paceline", "train", "digits", "--lr", "0.2", "--workers", "2"],
        "started_at": "2026-03-02T09:15:00+00:00",
        "history": [
            {
                "started_at": "2026-03-02T09:15:00+00:00",
                "world_size": 2,
                "from_step": 0,
                "from_epoch": 0,
                "reason": "start",
            }
        ],
    }


def summarise(rows: list[dict[str, object]], because: str) -> dict[str, object]:
    last = rows[-1]
    accuracies = [float(str(row["val_accuracy"])) for row in rows]
    best = max(accuracies)
    return {
        "recipe": "digits",
        "world_size": 2,
        "nodes": 1,
        "shards": 2,
        "global_batch": 64,
        "epochs": len(rows),
        "steps": last["step"],
        "samples_seen": 1437 * len(rows),
        "train_time_s": last["time_s"],
        "images_per_s": 10950.0,
        "train_loss": last["train_loss"],
        "val_loss": last["val_loss"],
        "val_accuracy": last["val_accuracy"],
        "val_top5_accuracy": last["val_top5_accuracy"] or None,
        "best_val_accuracy": best,
        "best_epoch": accuracies.index(best) + 1,
        "val_samples": 360,
        "stopped_because": because,
        "weights_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "snapshots_written": len(rows),
        "snapshots_skipped": 0,
        "restarts": 0,
    }


def write_run(
    path: Path,
    *,
    done: int = 12,
    epochs: int = 20,
    because: str | None = "target",
    top5: bool = True,
) -> RunDirectory:
    run = RunDirectory(path)
    run.create()
    run.run_json.write_text(json.dumps(describe_run(epochs)))
    rows = [metrics_row(epoch, epochs) for epoch in range(1, done + 1)]
    if not top5:
        rows = [{**r, "train_top5_accuracy": "", "val_top5_accuracy": ""} for r in rows]
    write_metrics(run.metrics_csv, rows)
    if because is not None:
        run.summary_json.write_text(json.dumps(summarise(rows, because)))
    for step in (done - 1, done):
        (run.snapshots / f"step-{step * STEPS_PER_EPOCH:012d}").mkdir()
    best = {"snapshot": f"step-{done * STEPS_PER_EPOCH:012d}"}
    (run.snapshots / "best.json").write_text(json.dumps(best))
    return run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDirectory]:
    """Make a run directory: see `write_run`."""
    return partial(write_run, tmp_path / "run")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Chrome]":
    """One Chromium for all tests of a file."""
    from tests.report.browsing import start_browser

    with start_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver
