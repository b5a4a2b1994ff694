"""A script runs as Python's main program: a file, or a module by its name."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.script.entry import _run_as_main
from tests.script.test_verified import REQUEST

TELLS = """
import json, sys
if __name__ == "__main__":
    with open("told.json", "w") as file:
        json.dump([sys.argv, sys.path[0], __package__], file)
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_file_and_a_module(
    is_module: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    folder = tmp_path / "paceline_entry_pkg"
    folder.mkdir()
    file = folder / "train.py"
    file.write_text(TELLS)
    reference = "paceline_entry_pkg.train" if is_module else str(file)
    _run_as_main(replace(REQUEST, reference=reference, script_args=("--lr", "1")))
    sys.modules.pop(folder.name, None)
    argv, place, package = json.loads((tmp_path / "told.json").read_text())
    assert argv[1:] == ["--lr", "1"]
    assert Path(place) == (tmp_path if is_module else folder)
    assert package == (folder.name if is_module else "")
