"""Which files of a project are copied, and which are links to the user's own."""

import subprocess
from pathlib import Path

import pytest

from paceline.verify.isolation import project_copy
from paceline.verify.isolation.project_copy import ProjectCopy
from tests.support.needs import GIT, need
from tests.support.tiers import slow

FILES = {"train.py": "print()", "src/model.py": "", "data/big.bin": "x" * 400, "ck/last.pt": "old"}


def write(top: Path, *ignored: str) -> None:
    for name, text in FILES.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    (top / ".gitignore").write_text("\n".join(ignored))


def copied(top: Path, directory: Path | None = None) -> ProjectCopy:
    target = top.with_name("copy")
    target.mkdir()
    copy = ProjectCopy.around(directory or top, target)
    copy.make()
    return copy


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which a hundred bytes are copied."""
    monkeypatch.setattr(project_copy, "_MOST_BYTES", 100)
    path = tmp_path / "project"
    write(path, "ck")
    return path


@pytest.mark.parametrize("has_git", [slow(True), False])
def test_small_files_are_copied_and_large_ones_linked(top: Path, has_git: bool) -> None:
    if has_git:
        need(GIT)
        subprocess.run(["git", "init", "-q", top], check=True)
    copy = copied(top, top / "src" if has_git else top)
    for name, text in FILES.items():
        path = Path(copy.copy, name)
        assert path.read_text() == text
        assert path.is_symlink() == (name == "data/big.bin")
        assert not path.parent.is_symlink()


@pytest.mark.slow
def test_what_git_lists_goes_first(top: Path) -> None:
    need(GIT)
    subprocess.run(["git", "init", "-q", top], check=True)
    (top / "src/model.py").write_text("m" * 90)
    copy = copied(top)
    assert not Path(copy.copy, "src/model.py").is_symlink()
    assert Path(copy.copy, "ck/last.pt").is_symlink()
    assert Path(copy.copy, ".git").is_symlink()


def test_a_directory_of_many_files_is_a_link(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_copy, "_MOST_FILES", 5)
    for number in range(6):
        (top / "data" / f"{number}").touch()
    assert Path(copied(top).copy, "data").is_symlink()


def test_links_lead_to_the_copy_or_out_of_the_project(top: Path) -> None:
    (top / "latest").symlink_to("ck/last.pt")
    (top / "absolute").symlink_to(top / "ck")
    (top / "outside").symlink_to("../elsewhere")
    copy = Path(copied(top).copy)
    assert (copy / "latest").resolve() == (copy / "absolute/last.pt").resolve()
    assert (copy / "latest").resolve() == copy / "ck/last.pt"
    assert (copy / "outside").readlink() == top.parent / "elsewhere"


def test_what_was_written_is_named_and_the_users_files_stay(top: Path) -> None:
    copy = copied(top)
    written = Path(copy.copy)
    (written / "ck/last.pt").write_text("newer")
    (written / "ck/new.pt").write_text("new")
    (written / "train.py").unlink()
    assert list(copy.written()) == [str(top / "ck/last.pt"), str(top / "ck/new.pt")]
    assert {name: (top / name).read_text() for name in FILES} == FILES


def test_paths_lead_to_the_copy_and_back(top: Path, tmp_path: Path) -> None:
    copy = copied(top)
    assert copy.path_in_copy(str(top / "src")) == f"{copy.copy}/src"
    assert copy.original(f'File "{copy.copy}/train.py"') == f'File "{top}/train.py"'
    for other in (str(tmp_path / "projects"), "package.module"):
        assert copy.path_in_copy(other) == other
