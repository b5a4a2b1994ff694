import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline import files
from paceline.checkpoint.export import export_weights
from paceline.errors import StorageError, UsageError
from tests.support.small_files import small_files


def tied_net() -> torch.nn.Sequential:
    net = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    net[1].weight = net[0].weight
    return net


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth"])
def test_weights_load_into_a_plain_model(tmp_path: Path, name: str) -> None:
    net, file = tied_net(), tmp_path / name
    export_weights(net.state_dict(), file)
    if file.suffix == ".safetensors":
        state = load_file(file)
    else:
        state = torch.load(file, weights_only=True)
    other = tied_net()
    other.load_state_dict(state)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_view_doesnt_drag_its_base_into_the_file(tmp_path: Path) -> None:
    export_weights({"x": torch.zeros(1 << 20)[:4]}, tmp_path / "w.pt")
    assert (tmp_path / "w.pt").stat().st_size < 10_000


def test_the_mode_is_the_users_usual_one(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_weights({"x": torch.zeros(4)}, tmp_path / "w.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o640


def test_other_suffixes_list_the_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"as '\.onnx'\. Known: \.safetensors, \.pt, \.pth"):
        export_weights({}, tmp_path / "w.onnx")


def test_an_existing_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    file.write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists"):
        export_weights({"x": torch.zeros(1)}, file)
    assert file.read_bytes() == b"precious"
    export_weights({"x": torch.zeros(1)}, file, overwrite=True)
    assert torch.load(file, weights_only=True) == {"x": torch.zeros(1)}


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        export_weights({}, tmp_path / "none" / "w.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_directory_in_the_files_place(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"w{suffix}"
    file.mkdir()
    with pytest.raises(UsageError, match=f"{file} can't be written: Is a directory"):
        export_weights({"x": torch.zeros(4)}, file, overwrite=True)
    with pytest.raises(UsageError, match="can't be written"):
        export_weights({"x": torch.zeros(4)}, tmp_path / ("w" * 300 + suffix))
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_a_failed_write_leaves_nothing(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        export_weights({"x": torch.zeros(4)}, tmp_path / f"w{suffix}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_a_full_disk_is_said_as_such(name: str, tmp_path: Path) -> None:
    """`torch.save` ends with an error about its archive, whatever the disk has said."""
    said = f"{name} can't be written: File too large"
    with small_files(20_000), pytest.raises(StorageError, match=said):
        export_weights({"x": torch.zeros(100_000)}, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(files, "open", refuse, raising=False)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UsageError, match=r"w\.pt can't be written: Read-only f"):
        export_weights({"x": torch.zeros(4)}, tmp_path / "w.pt")
