"""What a watched script saves is kept apart, by whatever name it is saved and found again."""

import os
from pathlib import Path

import pytest
import torch

from paceline.study.patching import Patches
from paceline.study.saving import SavedApart


@pytest.mark.parametrize("rename", ["os.replace", "os.rename", "Path.replace", "Path.rename"])
def test_saving_under_another_name_first(rename: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    temporary, final = own / "model.pt.tmp", own / "model.pt"
    final.write_text("of the last real training")
    with Patches() as patches:
        SavedApart(tmp_path / "apart").install(patches)
        torch.save(obj={"w": 1}, f=temporary)
        owner = os if rename.startswith("os") else Path
        getattr(owner, rename.partition(".")[2])(temporary, final)
        assert torch.load(f=str(final)) == {"w": 1}
        with pytest.raises(FileNotFoundError):
            torch.load(temporary)
    assert [path.name for path in own.iterdir()] == ["model.pt"]
    assert final.read_text() == "of the last real training"


def test_other_files_are_really_renamed(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("content")
    with Patches() as patches:
        SavedApart(tmp_path / "apart").install(patches)
        (tmp_path / "one").replace(tmp_path / "two")
    assert (tmp_path / "two").read_text() == "content"
