import io
import os
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from paceline.errors import UsageError
from paceline.launch import source_archive
from paceline.launch.source_archive import code_files, pack
from tests.support.needs import GIT, need


def write(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def git(directory: Path, *words: str) -> None:
    need(GIT)
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words]
    subprocess.run(command, cwd=directory, env=os.environ | own, check=True, capture_output=True)


def names(directory: Path) -> list[str]:
    return [str(path) for path in code_files(directory)]


@pytest.mark.slow
def test_what_git_ignores_stays_here(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "lib/net.py", "data/big.bin", ".gitignore", "gone.py", "é x.py")
    (tmp_path / ".gitignore").write_text("data/\n*.log\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "train.py", "gone.py")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "gone.py").unlink()
    write(tmp_path, "a.log", "runs/first/run.json", ".env", "deploy.pem")
    assert names(tmp_path) == [".gitignore", "lib/net.py", "train.py", "é x.py"]
    assert names(tmp_path / "lib") == ["net.py"]


def test_without_git_all_that_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "train.py", "lib/net.py", ".hidden", ".venv/x.py", "runs/a", "venv/pyvenv.cfg")
    write(tmp_path, "lib/__pycache__/net.pyc", "venv/bin/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert names(tmp_path) == ["lib/net.py", "train.py"]


def test_the_archive_is_the_files_and_nothing_of_their_owner(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "lib/net.py")
    (tmp_path / "train.py").chmod(0o755)
    (tmp_path / "link.py").symlink_to(tmp_path / "train.py")
    files = [PurePosixPath(name) for name in ("lib/net.py", "link.py", "train.py")]
    packed = pack(tmp_path, files)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        entries = {entry.name: entry for entry in archive}
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        archive.extractall(tmp_path / "out")
    assert list(entries) == [str(path) for path in files]
    assert all((e.uid, e.gid, e.uname, e.mtime) == (0, 0, "", 0) for e in entries.values())
    assert (tmp_path / "out" / "link.py").read_text() == "train.py"
    assert os.access(tmp_path / "out" / "train.py", os.X_OK)
    os.utime(tmp_path / "train.py", (1, 1))
    assert pack(tmp_path, files) == packed


def test_data_is_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_archive, "MAX_BYTES", 2**20)
    (tmp_path / "big.bin").write_bytes(os.urandom(3 * 2**20))
    with pytest.raises(UsageError, match=r"more than 1 MB: big\.bin \(3 MB\)"):
        pack(tmp_path, code_files(tmp_path))
