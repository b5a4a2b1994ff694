import errno
import fcntl
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paceline.checkpoint import file_writer, manifest
from paceline.checkpoint import format as snapshot_format
from paceline.checkpoint.file_writer import write_file
from paceline.checkpoint.format import (
    Snapshot,
    copy_to_host,
    manifest_text,
    of_unknown_format,
    read_snapshot,
    write_host_snapshot,
)
from paceline.errors import InfrastructureError, SnapshotError

MakeSnapshot = Callable[..., Snapshot]
Same = Callable[[Snapshot, Snapshot], bool]


@pytest.fixture
def written(tmp_path: Path, make_snapshot: MakeSnapshot) -> Path:
    directory = tmp_path / "step-000000000007"
    write_host_snapshot(directory, copy_to_host(make_snapshot(7)))
    return directory


def rewrite_manifest(directory: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = directory / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    path.write_bytes(manifest._encode(body))


def test_round_trip(written: Path, make_snapshot: MakeSnapshot, same: Same) -> None:
    assert same(read_snapshot(written), make_snapshot(7))
    names = ["manifest.json", "state.json", "tensors.safetensors"]
    assert sorted(p.name for p in written.iterdir()) == names


def test_any_reader_of_the_format_finds_each_groups_tensors(
    written: Path, make_snapshot: MakeSnapshot
) -> None:
    groups = make_snapshot(7).tensors
    with safe_open(written / "tensors.safetensors", framework="pt") as file:
        assert set(file.keys()) == {
            f"{g}/{name}" for g, members in groups.items() for name in members
        }
        assert torch.equal(file.get_tensor("model/bias"), groups["model"]["bias"])


def test_any_directory_name_can_be_read(
    written: Path, make_snapshot: MakeSnapshot, same: Same
) -> None:
    moved = written.rename(written.with_name("kept"))
    assert same(read_snapshot(moved), make_snapshot(7))


def test_what_was_read_stays_when_the_files_change(
    written: Path, make_snapshot: MakeSnapshot, same: Same
) -> None:
    snapshot = read_snapshot(written)
    for path in written.iterdir():
        with path.open("r+b") as file:
            file.write(b"\0" * path.stat().st_size)
    assert same(snapshot, make_snapshot(7))


def test_modes_keep_others_out_and_the_umask_is_honoured(
    tmp_path: Path, make_snapshot: MakeSnapshot
) -> None:
    directories = [tmp_path / "0", tmp_path / "128"]
    directories[1].mkdir(mode=0o700)
    for mask, directory, file_mode in zip((0, 0o200), directories, (0o600, 0o400), strict=True):
        before = os.umask(mask)
        try:
            if mask == 0:
                write_host_snapshot(directory, copy_to_host(make_snapshot(1)))
            else:
                write_file(directory / "x", [memoryview(b"x")])
        finally:
            os.umask(before)
        assert {p.stat().st_mode & 0o777 for p in directory.iterdir()} == {file_mode}
    assert (tmp_path / "0").stat().st_mode & 0o777 == 0o700


def test_a_snapshot_may_be_read_by_who_may_enter_the_directory_that_it_is_in(
    tmp_path: Path, make_snapshot: MakeSnapshot
) -> None:
    before = os.umask(0o027)
    try:
        (tmp_path / "shared").mkdir(mode=0o777)
        directory = tmp_path / "shared" / "snapshot"
        write_host_snapshot(directory, copy_to_host(make_snapshot(1)))
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o750
    assert {p.stat().st_mode & 0o777 for p in directory.iterdir()} == {0o640}


def test_an_existing_directory_is_never_written_into(
    written: Path, make_snapshot: MakeSnapshot
) -> None:
    with pytest.raises(FileExistsError):
        write_host_snapshot(written, copy_to_host(make_snapshot(8)))


def test_the_copy_doesnt_follow_the_training(make_snapshot: MakeSnapshot) -> None:
    x, state = torch.zeros(4), {"epoch": 1}
    host = copy_to_host(Snapshot(step=1, tensors={"model": {"x": x}}, state=state))
    before = b"".join(host.tensors.chunks())
    x.add_(1)
    state["epoch"] = 2
    assert b"".join(host.tensors.chunks()) == before
    assert json.loads(host.state) == {"epoch": 1}


def test_a_state_of_about_the_same_length_takes_the_same_room() -> None:
    sizes = {
        len(copy_to_host(Snapshot(step=1, tensors={}, state={"elapsed_s": seconds})).state)
        for seconds in (0.0, 1.5, 123456.0123456789)
    }
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("group", "state", "error"),
    [
        ("../model", {}, ValueError),
        ("mo/del", {}, ValueError),
        ("", {}, ValueError),
        ("model", {"loss": float("nan")}, ValueError),
        ("model", {"when": object()}, TypeError),
    ],
)
def test_what_cant_be_written_is_the_callers_mistake(
    group: str, state: dict[str, object], error: type[Exception]
) -> None:
    snapshot = Snapshot(step=1, tensors={group: {"x": torch.zeros(1)}}, state=state)
    with pytest.raises(error):
        copy_to_host(snapshot)


def direct_writes(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & file_writer._DIRECT)


@pytest.mark.parametrize("elements", [1, 16_000, 16_384, 2 * (8 << 20) // 4 + 77])
@pytest.mark.parametrize("host", ["as it is", "refuses", "fails", "writes little at a time"])
def test_however_the_host_takes_it_the_file_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, elements: int
) -> None:
    write, control, direct = os.write, fcntl.fcntl, []

    def written(descriptor: int, content: memoryview) -> int:
        if direct_writes(descriptor):
            direct.append(len(content))
            if host == "fails":
                raise OSError(errno.EINVAL, "Invalid argument")
            if host == "writes little at a time":
                content = content[: 3 * 4096]
        return write(descriptor, content)

    def controlled(descriptor: int, command: int, value: int = 0) -> int:
        if host == "refuses" and value & file_writer._DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, value)

    monkeypatch.setattr(os, "write", written)
    monkeypatch.setattr(fcntl, "fcntl", controlled)
    values = torch.arange(elements, dtype=torch.float32)
    directory = tmp_path / "s"
    write_host_snapshot(
        directory, copy_to_host(Snapshot(step=1, tensors={"model": {"x": values}}, state={}))
    )
    assert torch.equal(read_snapshot(directory).tensors["model"]["x"], values)
    if host != "refuses":
        assert bool(direct) == (elements >= 16_384 and file_writer._DIRECT != 0)


def test_every_flipped_bit_is_found(written: Path) -> None:
    draw = random.Random(0)
    files = sorted(written.iterdir())
    for number in range(100):
        path = files[number % len(files)]
        content = bytearray(path.read_bytes())
        position, bit = draw.randrange(len(content)), draw.randrange(8)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=path.name):
            read_snapshot(written)
        content[position] ^= 1 << bit
        path.write_bytes(content)
    read_snapshot(written)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.safetensors"])
def test_a_missing_truncated_or_replaced_file_is_named(written: Path, name: str) -> None:
    path = written / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(SnapshotError, match=f"{name} is damaged"):
        read_snapshot(written)
    path.unlink()
    with pytest.raises(SnapshotError, match=f"{name} is missing"):
        read_snapshot(written)
    path.mkdir()
    with pytest.raises(SnapshotError, match=f"{name} isn't a plain file"):
        read_snapshot(written)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(SnapshotError, match=f"{name} isn't a plain file"):
        read_snapshot(written)
    path.unlink()
    elsewhere = written.parent / "elsewhere"
    elsewhere.write_bytes(content)
    path.symlink_to(elsewhere)
    with pytest.raises(SnapshotError, match=f"{name} is a symbolic link"):
        read_snapshot(written)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="step-1 is missing"):
        read_snapshot(tmp_path / "step-1")


def test_a_manifest_too_large_is_not_read(written: Path) -> None:
    (written / "manifest.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(SnapshotError, match="larger than a manifest can be"):
        read_snapshot(written)


def test_another_format_version_is_told_from_damage(written: Path) -> None:
    assert not of_unknown_format(written)
    rewrite_manifest(written, lambda body: body.update(format=3))
    with pytest.raises(SnapshotError, match="format version 3; this Paceline knows: 2"):
        read_snapshot(written)
    assert of_unknown_format(written)
    (written / "manifest.json").write_bytes(b"{}")
    assert not of_unknown_format(written)


def test_a_snapshot_under_another_steps_name_is_refused(written: Path) -> None:
    moved = written.rename(written.with_name("step-000000000008"))
    with pytest.raises(SnapshotError, match="is of step 7, but its directory is step-000000000008"):
        read_snapshot(moved)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (60).to_bytes(8, "little")
        + b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}      ',
        (60).to_bytes(8, "little")
        + b'{"x":{"dtype":"PKL","shape":[1],"data_offsets":[0,4]}}      ',
    ],
)
def test_a_hostile_tensor_file_with_a_right_hash_is_refused(written: Path, content: bytes) -> None:
    path = written / "tensors.safetensors"
    path.unlink()
    entry = write_file(path, [memoryview(content)])

    def change(body: dict[str, object]) -> None:
        files = body["files"]
        assert isinstance(files, dict)
        files[path.name] = {"bytes": entry.bytes, "sha256": entry.sha256}

    rewrite_manifest(written, change)
    with pytest.raises(SnapshotError, match=r"tensors\.safetensors can't be read"):
        read_snapshot(written)


@pytest.mark.parametrize("content", [b"[1]", b"nonsense", b"[" * 100_000])
def test_a_state_that_is_no_object_is_refused(written: Path, content: bytes) -> None:
    path = written / "state.json"
    path.unlink()
    entry = write_file(path, [memoryview(content)])

    def change(body: dict[str, object]) -> None:
        files = body["files"]
        assert isinstance(files, dict)
        files["state.json"] = {"bytes": entry.bytes, "sha256": entry.sha256}

    rewrite_manifest(written, change)
    with pytest.raises(SnapshotError, match=r"state\.json"):
        read_snapshot(written)


def test_a_host_that_refuses_to_read_is_not_damage(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(snapshot_format, "_open", refuse)
    with pytest.raises(InfrastructureError, match="Permission denied"):
        read_snapshot(written)


def test_a_manifest_that_is_a_link_is_none(written: Path, tmp_path: Path) -> None:
    """It is read of directories that others may write."""
    manifest = written / "manifest.json"
    assert manifest_text(written)
    manifest.rename(tmp_path / "elsewhere.json")
    manifest.symlink_to(tmp_path / "elsewhere.json")
    assert manifest_text(written) == ""
