"""Every tracker there is, and how what it has is read back, by its own package."""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tests.support.needs import Need


@dataclass(kw_only=True)
class Tracked:
    """A run as a tracker has it."""

    config: dict[str, object] = field(default_factory=dict)
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Step and value, by tag."""
    summary: dict[str, float] = field(default_factory=dict)
    endings: list[str] = field(default_factory=list)
    """In the tracker's own words."""


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """How a tracker is driven in a test, without a network."""

    read: Callable[[Path, str], Tracked]
    """Gives what it has of a run: of the test's directory and the run's id."""
    environment: Callable[[Path], Mapping[str, str]] = lambda _: {}
    needs: Need | None = None
    endings: tuple[str, str] = ("stopped", "finished")
    """What it says of a run that was stopped, and of one that finished."""


def package(name: str, what: str) -> Need:
    return Need(
        what=what,
        attempt=lambda _: None if find_spec(name) else f"no package {name} (pip install {name})",
    )


def _read_lines(place: Path, run_id: str) -> Tracked:
    found = Tracked()
    for line in (place / "run" / "jsonl" / "run.jsonl").read_text().splitlines():
        content = json.loads(line)
        if "config" in content:
            found.config = content["config"]
        elif "ending" in content:
            found.endings.append(content["ending"])
            found.summary |= content["summary"]
        else:
            step = content.pop("step")
            for tag, value in content.items():
                found.points.setdefault(tag, []).append((step, value))
    return found


def _wandb_records(content: bytes) -> Iterator[bytes]:
    """Take a `.wandb` file apart: a header of 7 bytes, then LevelDB's log format.

    Blocks of 32 KiB; in them parts of records, each after its checksum, length and kind (1 whole,
    2 first, 3 middle, 4 last). https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    assert content.startswith(b":W&B")
    position, record = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        part = content[position + 7 : position + 7 + length]
        record = part if kind in (1, 2) else record + part
        position += 7 + length
        if kind in (1, 4):
            yield record


def _read_wandb(place: Path, run_id: str) -> Tracked:
    """Read the files of all offline runs of an id, which `wandb sync` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = Tracked()
    for path in sorted((place / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb")):
        for data in _wandb_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                updates = record.run.config.update
                found.config |= {u.key: json.loads(u.value_json) for u in updates}
            elif record.WhichOneof("record_type") == "history":
                items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
                for tag, value in items.items():
                    step = record.history.step.num
                    found.points.setdefault(tag, []).append((step, json.loads(value)))
            elif record.WhichOneof("record_type") == "summary":
                for update in record.summary.update:
                    key = update.key or "/".join(update.nested_key)
                    found.summary[key] = json.loads(update.value_json)
            elif record.WhichOneof("record_type") == "exit":
                found.endings.append(str(record.exit.exit_code))
    return found


def _read_mlflow(place: Path, run_id: str) -> Tracked:
    """Read the store with MLflow's own client, which has to be told that a folder will do."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient((place / "store").as_uri())
    run = client.get_run(run_id)
    found = Tracked(config=dict(run.data.params), endings=[run.info.status])
    for name, value in run.data.metrics.items():
        if name.startswith("summary/"):
            found.summary[name.removeprefix("summary/")] = value
            continue
        history = client.get_metric_history(run_id, name)
        found.points[name] = sorted((metric.step, metric.value) for metric in history)
    return found


TRACKERS: Mapping[str, Tracker] = {
    "jsonl": Tracker(read=_read_lines),
    "wandb": Tracker(
        read=_read_wandb,
        environment=lambda _: {"WANDB_MODE": "offline"},
        needs=package("wandb", "W&B"),
        endings=("75", "0"),
    ),
    "mlflow": Tracker(
        read=_read_mlflow,
        environment=lambda place: {
            "MLFLOW_TRACKING_URI": (place / "store").as_uri(),
            "MLFLOW_ALLOW_FILE_STORE": "true",
        },
        needs=package("mlflow", "MLflow"),
        endings=("KILLED", "FINISHED"),
    ),
}
