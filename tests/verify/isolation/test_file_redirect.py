"""Whatever a watched script does to files, real ones stay as they are and it sees its own."""

import glob
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.verify.isolation.file_isolation import Redirection
from paceline.verify.isolation.landlock import landlock_version
from paceline.verify.isolation.overlay import Overlay
from paceline.verify.patching import Patches

Tree = dict[str, str | None]


def tree(top: Path) -> Tree:
    """Give what is really there, by another program than this one's patched functions."""
    found = subprocess.run(
        [sys.executable, "-c", _TREE, str(top)], capture_output=True, text=True, check=True
    )
    content: Tree = eval(found.stdout)
    return content


_TREE = """
import sys
from pathlib import Path
from urllib.parse import quote
top = Path(sys.argv[1])
print({str(p.relative_to(top)): p.read_text("latin-1") if p.is_file() else None
       for p in sorted(top.rglob("*"))})
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory, as the working directory of a redirected script."""
    own = tmp_path / "own"
    (own / "runs" / "old").mkdir(parents=True)
    (own / "model.pt").write_text("of the last real training")
    (own / "log.txt").write_text("line 1\n")
    (own / "runs" / "old" / "a.txt").write_text("a")
    (own / "link.pt").symlink_to("model.pt")
    monkeypatch.chdir(own)
    before = tree(own)
    with Patches() as patches:
        overlay = Overlay(tmp_path / "apart" / "overlay", [tmp_path / "apart", Path("/dev")])
        Redirection(overlay).install(patches)
        yield own
    assert tree(own) == before


@pytest.mark.parametrize("absolute", [False, True])
def test_a_checkpoint_is_saved_copied_loaded_and_renamed(own: Path, absolute: bool) -> None:
    """As pytorch/examples' imagenet does, and as careful scripts do."""
    top = own if absolute else Path()
    state = {"epoch": 3, "w": torch.ones(3)}
    torch.save(state, str(top / "checkpoint.pth.tar"))
    shutil.copyfile(top / "checkpoint.pth.tar", top / "model_best.pth.tar")
    assert torch.load(top / "model_best.pth.tar")["epoch"] == 3
    torch.save(obj={"epoch": 4}, f=top / "model.pt.tmp")
    os.replace(top / "model.pt.tmp", top / "model.pt")
    assert torch.load(f=top / "model.pt") == {"epoch": 4}
    assert not (top / "model.pt.tmp").exists()
    with pytest.raises(FileNotFoundError, match=r"'[^']*model\.pt\.tmp'") as failed:
        torch.load(top / "model.pt.tmp")
    assert "apart" not in str(failed.value)


def _np_save() -> bool:
    np.save("array.npy", np.arange(3))
    return bool((np.load("array.npy") == np.arange(3)).all())


def _memmap() -> bool:
    np.memmap("map.bin", np.uint8, "w+", shape=4)[:] = 7
    return Path("map.bin").read_bytes() == b"\7" * 4


def _tofile() -> bool:
    np.arange(3, dtype=np.uint8).tofile("raw.bin")
    return bool((np.fromfile("raw.bin", np.uint8) == np.arange(3)).all())


def _safetensors() -> bool:
    save_file({"w": torch.ones(2)}, "model.safetensors")
    return load_file("model.safetensors")["w"].tolist() == [1, 1]


def _sqlite() -> bool:
    with sqlite3.connect("runs.db") as database:
        database.execute("create table runs (loss real)")
        database.execute("insert into runs values (0.5)")
        found = database.execute("select loss from runs").fetchall()
    database.close()
    return found == [(0.5,)]


def _sqlite_uri() -> bool:
    place = quote(str(Path.cwd() / "r?ns.db"))
    with sqlite3.connect(f"file:{place}?mode=rwc", uri=True) as database:
        database.execute("create table runs (loss real)")
    database.close()
    with sqlite3.connect(f"file:{place}?mode=ro", uri=True) as database:
        found = database.execute("select name from sqlite_master").fetchall()
    database.close()
    return found == [("runs",)] and Path("r?ns.db").is_file()


def _append() -> bool:
    with open("log.txt", "a") as file:
        file.write("line 2\n")
    return Path("log.txt").read_text() == "line 1\nline 2\n"


def _update() -> bool:
    with open("log.txt", "r+") as file:
        file.write("LINE")
    return Path("log.txt").read_text() == "LINE 1\n"


def _exclusive() -> bool:
    with pytest.raises(FileExistsError):
        Path("model.pt").open("x").close()
    with open("new.pt", "x") as file:
        file.write("n")
    return Path("new.pt").read_text() == "n"


def _through_a_link() -> bool:
    Path("link.pt").write_text("new")
    return Path("model.pt").read_text() == "new" and Path("link.pt").is_symlink()


def _new_link() -> bool:
    torch.save(1, "step_1.pt")
    os.symlink("step_1.pt", "last.pt")
    os.link("model.pt", "hard.pt")
    return torch.load("last.pt") == 1 and Path("hard.pt").read_text().startswith("of the last")


def _directories() -> bool:
    os.makedirs("out/deep/er", exist_ok=True)
    os.makedirs("runs/new", exist_ok=True)
    Path("out/deep/er/x").write_text("x")
    with pytest.raises(FileExistsError):
        os.mkdir("runs")
    with pytest.raises(FileNotFoundError):
        Path("nowhere/x").write_text("")
    with pytest.raises(OSError, match="not empty"):
        os.rmdir("runs")
    return (
        sorted(os.listdir("runs")) == ["new", "old"]
        and sorted(entry.name for entry in os.scandir("runs") if entry.is_dir()) == ["new", "old"]
        and glob.glob("out/**/x", recursive=True) == ["out/deep/er/x"]
        and [p.name for p in Path("runs").rglob("*.txt")] == ["a.txt"]
        and [names for _, _, names in os.walk("out")] == [[], [], ["x"]]
    )


def _removed() -> bool:
    os.remove("model.pt")
    Path("log.txt").unlink()
    shutil.rmtree("runs")
    gone = not any(os.path.exists(name) for name in ("model.pt", "log.txt", "runs"))
    with pytest.raises(FileNotFoundError):
        Path("model.pt").read_text()
    with pytest.raises(FileNotFoundError):
        os.unlink("model.pt")
    os.mkdir("runs")
    return gone and os.listdir("runs") == [] and os.listdir() == ["runs", "link.pt"]


def _moved() -> bool:
    shutil.move("runs", "before")
    os.makedirs("runs/old")
    return Path("before/old/a.txt").read_text() == "a" and os.listdir("runs/old") == []


def _rotated() -> bool:
    for number in range(3):
        os.makedirs(f"step-{number}.tmp")
        torch.save(number, f"step-{number}.tmp/model.pt")
        Path(f"step-{number}.tmp").rename(f"step-{number}")
        if number:
            shutil.rmtree(f"step-{number - 1}")
    return glob.glob("step-*") == ["step-2"] and torch.load("step-2/model.pt") == 2


def _attributes() -> bool:
    os.chmod("model.pt", 0o600)
    os.utime("model.pt", (1, 1))
    os.truncate("log.txt", 2)
    shutil.copy2("model.pt", "copy.pt")
    return os.stat("copy.pt").st_mtime == 1 and Path("log.txt").read_text() == "li"


def _descriptors() -> bool:
    number = os.open("log.txt", os.O_WRONLY | os.O_TRUNC)
    os.write(number, b"new")
    os.close(number)
    directory = os.open("runs", os.O_RDONLY)
    os.unlink("old/a.txt", dir_fd=directory)
    os.close(directory)
    return Path("log.txt").read_text() == "new" and not os.path.exists("runs/old/a.txt")


def _elsewhere() -> bool:
    os.mkdir("work")
    os.chdir("work")
    Path("x").write_text("x")
    Path("../y").write_text("y")
    os.chdir("..")
    return Path("work/x").read_text() == "x" and Path("y").read_text() == "y"


def _working_directory() -> bool:
    top = os.getcwd()
    os.makedirs("work/deep")
    os.chdir("work/deep")
    names = [os.getcwd(), os.fsdecode(os.getcwdb()), os.path.abspath("."), os.path.realpath(".")]
    is_own = names == [f"{top}/work/deep"] * 4 and Path.cwd() == Path(top, "work", "deep")
    Path("../../runs/x").write_text("x")
    os.chdir("../../runs")  # has files of both
    listed = subprocess.run(["ls"], capture_output=True, text=True, check=True).stdout
    is_real = Path.cwd() == Path(top, "runs") and Path("../model.pt").resolve().is_file()
    os.chdir(top)
    return is_own and is_real and listed == "old\n"


ACTS = {
    act.__name__.strip("_"): act
    for act in (
        _np_save,
        _memmap,
        _tofile,
        _safetensors,
        _sqlite,
        _sqlite_uri,
        _append,
        _update,
        _exclusive,
        _through_a_link,
        _new_link,
        _directories,
        _removed,
        _moved,
        _rotated,
        _attributes,
        _descriptors,
        _elsewhere,
        _working_directory,
    )
}


@pytest.mark.parametrize("act", ACTS.values(), ids=list(ACTS))
@pytest.mark.core_cases(8)
def test_a_script_sees_what_it_did_and_nothing_has_happened(
    act: Callable[[], bool], own: Path
) -> None:
    assert act()


def test_ranks_share_what_was_written(tmp_path: Path) -> None:
    places = (tmp_path / "overlay", [tmp_path / "overlay"])
    one, two = Overlay(*places), Overlay(*places)
    real = tmp_path / "model.pt"
    real.write_text("real")
    key = one.key(real, follow=True)
    assert key is not None
    Path(one.writable(key, keep=False)).write_text("new")
    assert Path(two.readable(key)).read_text() == "new"
    two.remove(key, directory=False)
    assert one.visible(key) is None
    assert real.read_text() == "real"


def test_what_couldnt_be_written_anyway_is_refused(tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "overlay", [])
    with pytest.raises(FileNotFoundError):
        overlay.writable(str(tmp_path / "no" / "file"), keep=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        overlay.place_of_new(str(tmp_path / "file" / "x"))


_NATIVE = """
import subprocess, sys
from pathlib import Path
from urllib.parse import quote
from paceline.verify.isolation.landlock import write_only_below
own, apart = map(Path, sys.argv[1:])
assert write_only_below([apart, Path("/dev")])
for word in (f"> {own}/new", f"> {own}/kept", f"rm {own}/kept", f"mv {own}/kept {apart}/x",
             f"mkdir {own}/d", f"ln -s x {own}/l"):
    assert subprocess.run(["sh", "-c", word.replace(">", "echo changed >", 1)]).returncode
(apart / "made").write_text("x")
"""


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
def test_other_programs_cant_write_elsewhere(tmp_path: Path) -> None:
    own, apart = tmp_path / "own", tmp_path / "apart"
    own.mkdir()
    apart.mkdir()
    (own / "kept").write_text("kept")
    done = subprocess.run(
        [sys.executable, "-c", _NATIVE, own, apart], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert tree(own) == {"kept": "kept"}
    assert tree(apart) == {"made": "x"}
