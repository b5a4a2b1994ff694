"""A worker from its first line to its last, and the records that it leaves."""

import errno
import json
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.checkpoint.format import HostSnapshot, read_snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.distributed.group import Group
from paceline.errors import ExitCode, InterruptedTraining, StorageError
from paceline.options.fields import OptionValue
from paceline.results.metrics_table import read_table
from paceline.results.run_directory import RunDirectory
from paceline.training import worker
from paceline.training.config import TrainConfig, TrainRequest, merge
from paceline.training.evaluation.evaluate_run import evaluate_run, find_snapshot
from paceline.training.recipe import load_recipe
from paceline.training.run_record.previous_run import PreviousRun
from paceline.training.status_exchange import StopFlag
from paceline.training.worker import finish, run_training
from tests.support.agent import AgentStore
from tests.support.ranks import run_ranks
from tests.support.sessions import net, pair_of, points, session_on, sgd
from tests.support.trainings import prepared

pytestmark = pytest.mark.ranks
REFERENCE = "paceline.recipes.digits:digits"
STEPS = 23  # 1,442 images in batches of 64


def request(directory: Path, **given: OptionValue) -> TrainRequest:
    own: dict[str, OptionValue] = {"epochs": 2, "progress": "plain", "device": "cpu", "lr": 0.05}
    settings = merge(own | given, load_recipe(REFERENCE).settings)
    return TrainRequest(
        recipe="digits",
        reference=REFERENCE,
        arguments={"dropout": 0.1},
        settings=settings,
        given=("epochs", "progress", "dropout"),
        run_dir=str(directory),
        command=("paceline", "train", "digits"),
        started_at="2026-01-01T00:00:00+00:00",
    )


def train(world_size: int, asked: TrainRequest) -> list[str]:
    prepared(Path(asked.run_dir))
    store = AgentStore()

    def body(group: Group) -> str:
        store.become_worker(group)
        return run_training(asked.to_json())

    return run_ranks(world_size, body)


def read(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text())
    return content


def test_a_request_survives_the_way_to_the_worker(tmp_path: Path) -> None:
    asked = request(tmp_path)
    assert TrainRequest.from_json(asked.to_json()) == asked


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.slow
def test_what_a_training_leaves_behind(
    world_size: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = request(tmp_path)
    assert train(world_size, asked) == ['{"stopped_because": "epochs"}'] * world_size
    out = capfd.readouterr().out
    run = RunDirectory(tmp_path)
    check_run_json(read(run.run_json), world_size, asked)
    check_summary(read(run.summary_json), world_size)
    rows = read_table(run.metrics_csv)
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "23"), ("2", "46")]
    assert all(cell for row in rows for cell in row.values())  # ten classes: top-5 as well
    assert float(rows[1]["train_loss"]) < float(rows[0]["train_loss"])
    assert SnapshotStore(run.snapshots, 3).steps() == [STEPS, 2 * STEPS]
    assert out.count("val loss") == 1
    assert "  lr        0.05" in out
    assert str(run.path) in out


def check_run_json(content: dict[str, object], world_size: int, asked: TrainRequest) -> None:
    assert content["format"] == 1
    assert content["recipe"] == "digits"
    assert content["reference"] == REFERENCE
    assert content["recipe_arguments"] == {"dropout": 0.1}
    assert content["given"] == list(asked.given)
    assert content["command"] == list(asked.command)
    settings = TrainConfig.from_settings(asked.settings).settings()
    assert content["settings"] == json.loads(json.dumps(settings))  # JSON has lists for tuples
    assert content["started_at"] == asked.started_at
    derived = content["derived"]
    assert isinstance(derived, dict)
    expected = {
        "world_size": world_size,
        "nodes": 1,
        "shards": world_size,
        "global_batch": 64,
        "batch_per_worker": [64 // world_size] * world_size,
        "micro_batches": 1,
        "lr": 0.05,
        "memory_format": "channels-last",
        "precision": "fp32",
        "backend": "gloo",
        "threads": 1,
        "steps_per_epoch": STEPS,
        "train_samples": 1442,
        "val_samples": 355,
    }
    assert derived.items() >= expected.items()
    assert derived.keys() >= {"lr_rule", "device", "parameters", "optimizer"}
    hosts, history = content["hosts"], content["history"]
    assert isinstance(hosts, list)
    assert isinstance(history, list)
    (host,) = hosts
    assert host["host"] == socket.gethostname()
    assert host["ranks"] == list(range(world_size))
    assert host.keys() >= {"device", "cpu", "cores"}
    assert content["versions"].keys() >= {"python", "torch", "numpy", "paceline"}  # type: ignore[attr-defined]
    assert "git" in content
    (start,) = history
    assert start["reason"] == "start"
    assert (start["world_size"], start["from_step"], start["from_epoch"]) == (world_size, 0, 0)


def check_summary(content: dict[str, object], world_size: int) -> None:
    expected = {
        "recipe": "digits",
        "world_size": world_size,
        "nodes": 1,
        "shards": world_size,
        "global_batch": 64,
        "epochs": 2,
        "steps": 2 * STEPS,
        "samples_seen": 2 * 1442,
        "val_samples": 355,
        "stopped_because": "epochs",
        "evaluated_weights": "model",
        "peak_gpu_memory_bytes": None,
        "snapshots_written": 2,
        "final_snapshot": f"step-{2 * STEPS:012d}",
        "snapshots_skipped": 0,
        "restarts": 0,
    }
    assert content.items() >= expected.items()
    figures = ["train_time_s", "images_per_s", "train_loss", "val_loss", "val_accuracy"]
    figures += ["val_top5_accuracy", "best_val_accuracy"]
    for name in figures:
        value = content[name]
        assert isinstance(value, float), name
        assert value > 0, name
    assert content["best_epoch"] in (1, 2)
    assert len(str(content["weights_sha256"])) == 64


def _full_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    publish = SnapshotStore.publish

    def refused(store: SnapshotStore, host: HostSnapshot, *, best: bool) -> Path:
        if host.step > step:
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(store, host, best=best)

    monkeypatch.setattr(SnapshotStore, "publish", refused)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.slow
def test_final_weights_that_are_in_no_snapshot_are_a_failure_on_every_worker(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _full_after(monkeypatch, STEPS)
    monkeypatch.setattr(worker, "LAST_SNAPSHOT_S", 0.1)
    asked, store = request(tmp_path), AgentStore()
    prepared(tmp_path)

    def body(group: Group) -> tuple[str, int]:
        store.become_worker(group)
        with pytest.raises(StorageError) as caught:
            run_training(asked.to_json())
        return str(caught.value), int(caught.value.exit_code)

    for message, code in run_ranks(world_size, body):
        assert f"its final weights, of step {2 * STEPS}, are in no snapshot" in message
        assert f"on {socket.gethostname()}, the snapshot of step {2 * STEPS} could not" in message
        assert "No space left on device" in message
        assert code == ExitCode.INFRASTRUCTURE
    assert not (tmp_path / "summary.json").exists()
    assert SnapshotStore(tmp_path / "snapshots", 3).steps() == [STEPS]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.core_cases(1)
def test_a_run_directory_that_was_moved_is_a_failure_on_every_worker(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    publish = SnapshotStore.publish

    def moved(store: SnapshotStore, host: HostSnapshot, *, best: bool) -> Path:
        path = publish(store, host, best=best)
        if host.step == STEPS:
            run.rename(tmp_path / "elsewhere")
        return path

    monkeypatch.setattr(SnapshotStore, "publish", moved)
    asked, store = request(run), AgentStore()
    prepared(run)

    def body(group: Group) -> str:
        store.become_worker(group)
        with pytest.raises(StorageError) as caught:
            run_training(asked.to_json())
        return str(caught.value)

    for message in run_ranks(world_size, body):
        assert message.startswith(
            f"{run / 'run.json'} is gone: the run directory was removed, moved"
        )
    assert (tmp_path / "elsewhere" / "run.json").exists()
    assert not (run / "summary.json").exists()


@pytest.mark.slow
def test_going_on_is_noted_in_the_history(tmp_path: Path) -> None:
    train(2, request(tmp_path, epochs=1))
    first = read(tmp_path / "summary.json")
    train(1, request(tmp_path, epochs=2, workers=1))
    content = read(tmp_path / "run.json")
    history = content["history"]
    assert isinstance(history, list)
    assert [(s["reason"], s["world_size"], s["from_step"]) for s in history] == [
        ("start", 2, 0),
        ("resume", 1, STEPS),
    ]
    second = read(tmp_path / "summary.json")
    assert (first["epochs"], second["epochs"]) == (1, 2)
    assert second["samples_seen"] == 2 * 1442


@pytest.mark.slow
def test_judging_afterwards_gives_the_same_figures(tmp_path: Path) -> None:
    train(2, request(tmp_path))
    summary = read(tmp_path / "summary.json")
    run = RunDirectory(tmp_path)
    last = evaluate_run(run, find_snapshot(run, "last", print))
    assert last.samples == 355
    assert last.figures["accuracy"] == summary["val_accuracy"]
    assert last.figures["top5_accuracy"] == summary["val_top5_accuracy"]
    assert last.figures["loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    assert int(last.confusion.sum()) == 355
    assert int(last.confusion.diagonal().sum()) / 355 == last.figures["accuracy"]
    best = evaluate_run(run, find_snapshot(run, "best", print))
    assert best.figures["accuracy"] == summary["best_val_accuracy"]
    assert PreviousRun.read(run).arguments == {"dropout": 0.1}
    assert read_snapshot(last.snapshot).step == 2 * STEPS


@pytest.mark.parametrize("signalled", [False, True])
def test_only_what_ran_to_its_end_is_judged(signalled: bool, tmp_path: Path) -> None:
    """After a signal there are seconds left: they belong to the snapshot."""

    def body(group: Group) -> list[str]:
        judged, flag = list[str](), StopFlag(under_launcher=True)
        with session_on(group, tmp_path, flag=flag) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=8)
            flag.name = "SIGTERM" if signalled else None
            with suppress(InterruptedTraining):
                for _ in s.epochs(1):
                    for x, y in map(pair_of, batches):
                        s.step(F.cross_entropy(model(x), y))

            def judge_it() -> dict[str, object]:
                judged.append("judged")
                return {"test_loss": 1.0}

            s.engine.context.run.run_json.touch()
            finish(s.engine, request(tmp_path), judge_it)
        return judged

    assert run_ranks(1, body) == [[] if signalled else ["judged"]]
    summary = read(tmp_path / "summary.json")
    assert summary["stopped_because"] == ("signal" if signalled else "epochs")
    assert ("test_loss" in summary) is not signalled
