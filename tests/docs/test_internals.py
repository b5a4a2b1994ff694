"""The walks of docs/internals: the diff of each fits the source of today and does what is said."""

import json

from tests.docs.pages import ROOT, blocks
from tests.training.snapshots.test_golden import GOLDEN

WALKS = ROOT / "docs" / "internals"


def patched(source: str, diff: str) -> str:
    """Apply a diff of one place, as a page shows it: lines with a space, + or - before them."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-"))
    after = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+"))
    assert source.count(before) == 1, f"the page's diff doesn't fit: {before}"
    return source.replace(before, after)


def test_a_field_of_snapshots_needs_one_place() -> None:
    (block,) = blocks(WALKS / "add-a-snapshot-field.md", "diff")
    source = (ROOT / "src/paceline/training/snapshots/train_state.py").read_text()
    module: dict[str, object] = {"__name__": "patched"}
    exec(compile(patched(source, block.text), "train_state.py", "exec"), module)
    state = module["TrainState"]
    (earlier,) = GOLDEN.glob("with-rows/step-*/state.json")
    position = json.loads(earlier.read_text())["position"]
    loaded = state.from_json(position)  # type: ignore[attr-defined]
    assert loaded.to_json().items() >= position.items()
    assert loaded.skipped_steps == 0
    loaded.skipped_steps = 3
    assert state.from_json(loaded.to_json()).skipped_steps == 3  # type: ignore[attr-defined]
