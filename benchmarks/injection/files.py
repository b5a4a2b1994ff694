"""Faults of the files of a stopped training: flipped bits, torn, emptied, lost, foreign."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.injection.kind import Act, Kind, between
from benchmarks.injection.training import Training

_DAMAGED = r"set aside as step-\d+\.damaged"
_BLOCK = 4096


def _newest(training: Training) -> Path:
    return max(training.run_dir.glob("snapshots/step-*"))


def flip_bit(path: Path, training: Training) -> None:
    """Flip one random bit of a file."""
    content = bytearray(path.read_bytes())
    content[training.random.randrange(len(content))] ^= 1 << training.random.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, training: Training) -> None:
    """Cut a file off at a random place."""
    path.write_bytes(path.read_bytes()[: training.random.randrange(path.stat().st_size)])


def zero_block(path: Path, training: Training) -> None:
    """Zero a random block of a file, or all of a short one."""
    content = bytearray(path.read_bytes())
    start = training.random.randrange(max(1, len(content) - _BLOCK))
    end = min(len(content), start + _BLOCK)
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def remove(path: Path, training: Training) -> None:
    """Remove a file."""
    path.unlink()


Damage = Callable[[Path, Training], None]


def _in_newest(damage: Damage, name: str = "") -> Act:
    def act(training: Training) -> None:
        names = sorted(path.name for path in _newest(training).iterdir())
        damage(_newest(training) / (name or training.random.choice(names)), training)

    return act


def _in_run(name: str, damage: Damage) -> Act:
    def act(training: Training) -> None:
        path = training.run_dir / name
        if path.exists() and path.stat().st_size:  # the table isn't there before the first epoch
            damage(path, training)

    return act


def _in_all(training: Training) -> None:
    for path in training.run_dir.glob("snapshots/step-*"):
        flip_bit(path / "tensors.safetensors", training)


def _emptied(training: Training) -> None:
    for path in _newest(training).iterdir():
        path.unlink()


def _all_removed(training: Training) -> None:
    shutil.rmtree(training.run_dir / "snapshots")


def _write(name: str, text: str) -> Act:
    return lambda training: (training.run_dir / name).write_text(text)


def _interrupted_writes(training: Training) -> None:
    snapshots = training.run_dir / "snapshots"
    for name in (".tmp-step-000000000091-abcdef12", ".trash-step-000000000001-abcdef12"):
        shutil.copytree(_newest(training), snapshots / name)
    (snapshots / ".tmp-x").write_text("a file\n")


def _from_the_future(training: Training) -> None:
    (training.run_dir / "snapshots" / "step-999999999999").mkdir()


def _kept_aside(name: str, damage: Damage) -> tuple[Act, Act]:
    """Damage a file that nothing can replace; and bring it back."""

    def break_it(training: Training) -> None:
        shutil.copy2(training.run_dir / name, training.room / "aside")
        damage(training.run_dir / name, training)

    def bring_back(training: Training) -> None:
        shutil.copy2(training.room / "aside", training.run_dir / name)

    return break_it, bring_back


def _of_run_json(name: str, damage: Damage, says: str) -> Kind:
    break_it, bring_back = _kept_aside("run.json", damage)
    return between(name, break_it, mend=bring_back, codes=(2,), says=says)


def _write_format_99(path: Path, training: Training) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


def _nulls(path: Path, training: Training) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _half_a_row(path: Path, training: Training) -> None:
    path.write_bytes(path.read_bytes() + b"3,77,")


KINDS: Sequence[Kind] = (
    between("a flipped bit in a snapshot", _in_newest(flip_bit), says=_DAMAGED),
    between(
        "a flipped bit in a snapshot's tensors",
        _in_newest(flip_bit, "tensors.safetensors"),
        says=_DAMAGED,
    ),
    between("a truncated file in a snapshot", _in_newest(truncate), says=_DAMAGED),
    between(
        "a zeroed block in a snapshot",
        _in_newest(zero_block, "tensors.safetensors"),
        says=_DAMAGED,
    ),
    between("a file missing in a snapshot", _in_newest(remove), says=_DAMAGED),
    between("an empty snapshot", _emptied, says=_DAMAGED),
    between("all snapshots damaged", _in_all, says="starts from the beginning"),
    between("all snapshots gone", _all_removed, says="beginning"),
    between("what interrupted writes leave", _interrupted_writes, says="Finished"),
    between("an empty directory as the newest snapshot", _from_the_future, says=_DAMAGED),
    between("best.json torn", _write("snapshots/best.json", '{"snap'), says="Finished"),
    between("generation.json torn", _write("snapshots/generation.json", '{"gen'), says="Finished"),
    between("metrics.csv truncated", _in_run("metrics.csv", truncate), says="Finished"),
    between("metrics.csv of NUL bytes", _in_run("metrics.csv", _nulls), says="Finished"),
    between("half a row in metrics.csv", _in_run("metrics.csv", _half_a_row), says="Finished"),
    between("metrics.csv gone", _in_run("metrics.csv", remove), says="Finished"),
    between("steps.csv of NUL bytes", _in_run("steps.csv", _nulls), says="Finished"),
    between("half a row in steps.csv", _in_run("steps.csv", _half_a_row), says="Finished"),
    between("steps.csv gone", _in_run("steps.csv", remove), says="Finished"),
    between("profile.json torn", _write("profile.json", '{"format": 1, "par'), says="Finished"),
    between("logs/ gone", lambda t: shutil.rmtree(t.run_dir / "logs"), says="Finished"),
    between("run.lock gone", _in_run("run.lock", remove), says="Finished"),
    _of_run_json("run.json truncated", truncate, r"run\.json can't be read|holds no training"),
    _of_run_json("run.json of NUL bytes", _nulls, r"run\.json"),
    _of_run_json("run.json of a format to come", _write_format_99, r"run\.json.*99"),
)
