"""What holds for every training that was disturbed and has come to its end. No Paceline in it."""

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.numpy import load

_SNAPSHOT = r"step-\d{12}"
_NAMES = (
    r"run\.json|metrics\.csv|steps\.csv|summary\.json|profile\.json|report\.html|run\.lock|snapshots|logs",
    r"logs/(rank-\d+\.log|(attempt-\d+-)?failure-rank-\d+\.json|hang-\d+\.txt)",
    r"snapshots/(best|generation)\.json",
    rf"snapshots/{_SNAPSHOT}((\.damaged|\.superseded)(-\d+)?(/.*)?)?",
    rf"snapshots/{_SNAPSHOT}/(tensors\.safetensors|state\.json|manifest\.json)",
)
_CACHES = "torchinductor_"
"""torch's own cache of compiled code, which is to stay."""
_DOCUMENTED = re.compile("|".join(f"(?:{name})" for name in _NAMES))


def undocumented(run_dir: Path) -> list[str]:
    """List what an ended run directory has that docs/reference/run-directory.md doesn't name."""
    names = (str(path.relative_to(run_dir)) for path in run_dir.rglob("*"))
    return sorted(name for name in names if not _DOCUMENTED.fullmatch(name))


def broken_snapshots(run_dir: Path) -> list[str]:
    """Name the snapshots in place that aren't whole, each with what is wrong."""
    return [
        f"{path.name}: {problem}"
        for path in sorted(run_dir.glob("snapshots/step-*"))
        if re.fullmatch(_SNAPSHOT, path.name) and (problem := _problem(path))
    ]


def _problem(path: Path) -> str:
    try:
        files: Mapping[str, Mapping[str, object]] = json.loads(
            (path / "manifest.json").read_text()
        )["files"]
        for name, entry in files.items():
            content = (path / name).read_bytes()
            if len(content) != entry["bytes"]:
                return f"{name} has {len(content)} bytes instead of {entry['bytes']}"
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                return f"{name} has another SHA-256"
    except (OSError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def newest_weights_sha256(run_dir: Path) -> str:
    """Hash the weights in the newest snapshot, as docs/reference/run-directory.md says."""
    newest = max(p for p in run_dir.glob("snapshots/step-*") if re.fullmatch(_SNAPSHOT, p.name))
    tensors = load((newest / "tensors.safetensors").read_bytes())
    digest = hashlib.sha256()
    for name, array in sorted(tensors.items()):
        group, _, own = name.partition("/")
        if group == "model":
            digest.update(f"{own}\0{array.dtype}\0{array.shape}\0".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()


def problems_of_table(run_dir: Path, epochs: int) -> list[str]:
    """Say what is wrong with `metrics.csv`: a row an epoch, each once, and nothing but text."""
    content = (run_dir / "metrics.csv").read_bytes()
    if b"\0" in content:
        return ["metrics.csv has NUL bytes"]
    found = [row.get("epoch") for row in csv.DictReader(content.decode().splitlines())]
    wanted = [str(epoch) for epoch in range(1, epochs + 1)]
    return [] if found == wanted else [f"metrics.csv has the epochs {found}"]


def problems_of_steps(run_dir: Path) -> list[str]:
    """Say what is wrong with `steps.csv`: no step stands twice, and there is nothing but text."""
    content = (run_dir / "steps.csv").read_bytes()
    if b"\0" in content:
        return ["steps.csv has NUL bytes"]
    found = [int(row["step"]) for row in csv.DictReader(content.decode().splitlines())]
    return [] if found == sorted(set(found)) else [f"steps.csv has the steps {found}"]


def problems_at_the_end(run_dir: Path, wanted: str | None, epochs: int) -> list[str]:
    """Say what is wrong with a training that has ended with 0.

    Args:
        run_dir: Its run directory.
        wanted: The undisturbed training's `weights_sha256`; None for that training itself.
        epochs: That it was to have.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    found = []
    if summary["weights_sha256"] != wanted and wanted is not None:
        found.append(f"weights {summary['weights_sha256'][:16]}, undisturbed {wanted[:16]}")
    if summary["stopped_because"] != "epochs" or summary["epochs"] != epochs:
        found.append(f"{summary['epochs']} epochs, stopped because {summary['stopped_because']}")
    if newest_weights_sha256(run_dir) != summary["weights_sha256"]:
        found.append("the newest snapshot doesn't hold the final weights")
    found += problems_of_table(run_dir, epochs) + problems_of_steps(run_dir)
    found += [f"not whole: {name}" for name in broken_snapshots(run_dir)]
    found += [f"not documented: {name}" for name in undocumented(run_dir)]
    return found


def leftovers(directories: Iterable[Path]) -> list[str]:
    """List what is in directories that should be empty: temporary files, shared memory.

    Paceline's own directory for such files may stay, empty.
    """
    found = (path for directory in directories for path in sorted(directory.glob("*")))
    return [str(path) for path in found if not _may_stay(path)]


def _may_stay(path: Path) -> bool:
    is_caches = path.name.startswith(_CACHES)
    is_empty = path.is_dir() and not any(path.iterdir())
    return is_caches or (is_empty and path.name == f"paceline-{os.geteuid()}")
