"""A snapshot that comes from another host, in pieces."""

import errno
import json
import re
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.checkpoint import streaming
from paceline.checkpoint.format import Snapshot, manifest_text, read_snapshot
from paceline.checkpoint.manifest import STATE, TENSORS, FileEntry, Manifest, encode_manifest
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.streaming import Piece, parse_sent, pieces_of, read_pieces
from paceline.errors import SnapshotError
from tests.support.needs import MEMORY_DISK, need
from tests.support.small_files import small_files
from tests.support.snapshots import publish

MakeSnapshot = Callable[..., Snapshot]
Same = Callable[[Snapshot, Snapshot], bool]


@pytest.fixture
def source(tmp_path: Path, make_snapshot: MakeSnapshot) -> SnapshotStore:
    store = SnapshotStore(tmp_path / "source", keep_last=2)
    publish(store, make_snapshot(7))
    return store


@pytest.fixture
def target(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "deep" / "target", keep_last=2)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", 300)


def sent(store: SnapshotStore, step: int = 7) -> Generator[Piece, None, None]:
    """The pieces of a snapshot, all in one buffer, as they come from a host."""
    manifest = parse_sent(store.manifest(step).encode())
    buffer = memoryview(bytearray(streaming.PIECE_BYTES))
    with closing(read_pieces(store.path_of(step), manifest, buffer)) as reading:
        for name, size in pieces_of(manifest):
            assert next(reading) == size
            yield name, buffer[:size]
        assert next(reading, None) is None


def test_it_arrives_as_it_was_and_by_the_same_protocol(
    source: SnapshotStore, target: SnapshotStore, make_snapshot: MakeSnapshot, same: Same
) -> None:
    seen: list[str] = []
    assert target.receive(source.manifest(7), sent(source), phase=seen.append) == target.path_of(7)
    assert same(read_snapshot(target.path_of(7)), make_snapshot(7))
    assert target.manifest(7) == source.manifest(7) != ""
    assert seen == ["renamed"]
    assert [path.name for path in target.directory.iterdir()] == ["step-000000000007"]
    assert target.path_of(7).stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in target.path_of(7).iterdir()} == {0o600}


def test_one_of_the_same_step_is_replaced_and_others_stay(
    source: SnapshotStore, target: SnapshotStore, make_snapshot: MakeSnapshot, same: Same
) -> None:
    for step in (5, 6, 7):
        publish(target, make_snapshot(step, size=50), best=step == 5)
    target.receive(source.manifest(7), sent(source))
    assert target.steps() == [5, 6, 7]
    assert same(read_snapshot(target.path_of(7)), make_snapshot(7))
    assert target.best() == target.path_of(5)


def torn(pieces: Iterator[Piece]) -> Iterator[Piece]:
    yield next(pieces)


def without_the_tensors(pieces: Iterator[Piece]) -> Iterator[Piece]:
    return (piece for piece in pieces if piece[0] == STATE)


def flipped(pieces: Iterator[Piece]) -> Iterator[Piece]:
    name, first = next(pieces)
    yield name, memoryview(bytes([first[0] ^ 1]) + bytes(first[1:]))
    yield from pieces


def too_long(pieces: Iterator[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        yield piece
        yield piece


def twice(pieces: Iterator[Piece]) -> Iterator[Piece]:
    held = [(name, memoryview(bytes(content))) for name, content in pieces]
    yield from held
    yield held[0]


def elsewhere(pieces: Iterator[Piece]) -> Iterator[Piece]:
    return ((f"../{name}", content) for name, content in pieces)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (torn, "state.json arrived damaged"),
        (without_the_tensors, r"tensors\.safetensors didn't arrive"),
        (flipped, "state.json arrived damaged"),
        (too_long, r"more of state\.json arrived than the 512 bytes it has"),
        (twice, "'state.json' arrived, but nothing more was awaited"),
        (elsewhere, r"'\.\./state\.json' arrived, but "),
    ],
)
@pytest.mark.parametrize("held", [False, True])
def test_what_isnt_what_the_manifest_says_leaves_nothing(
    source: SnapshotStore,
    target: SnapshotStore,
    make_snapshot: MakeSnapshot,
    fault: Callable[[Iterator[Piece]], Iterator[Piece]],
    said: str,
    held: bool,
) -> None:
    if held:
        publish(target, make_snapshot(7, size=9))
    before = target.manifest(7)
    with pytest.raises(SnapshotError, match=said):
        target.receive(source.manifest(7), fault(sent(source)))
    assert target.manifest(7) == before
    assert [path.name for path in target.directory.iterdir()] == ["step-000000000007"] * held
    assert [path.name for path in target.directory.parent.iterdir()] == ["target"]


def test_a_manifest_that_isnt_one_is_refused(source: SnapshotStore, target: SnapshotStore) -> None:
    good = source.manifest(7)
    body = json.loads(good)
    body["files"]["../x"] = body["files"].pop(STATE)
    wrong = [good[:-5], good.replace("7", "8"), "[]", json.dumps(body), ""]
    for content in wrong:
        with pytest.raises(SnapshotError, match="manifest that another host sent"):
            target.receive(content, sent(source))
    entry = FileEntry(bytes=1, sha256="0" * 64)
    escaping = encode_manifest(Manifest(step=7, files={TENSORS: entry, "../x": entry})).decode()
    with pytest.raises(SnapshotError, match="must name"):
        target.receive(escaping, sent(source))
    assert not target.directory.exists()


def test_a_sender_that_fails_leaves_nothing(source: SnapshotStore, target: SnapshotStore) -> None:
    def pieces() -> Iterator[Piece]:
        yield next(sent(source))
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        target.receive(source.manifest(7), pieces())
    assert list(target.directory.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("probed", [True, False])
def test_a_full_disk(
    source: SnapshotStore,
    tmp_path: Path,
    make_snapshot: MakeSnapshot,
    monkeypatch: pytest.MonkeyPatch,
    probed: bool,
) -> None:
    monkeypatch.setattr(streaming, "PIECE_BYTES", 8 << 20)
    publish(source, make_snapshot(8, size=800_000))
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(where)]
    need(MEMORY_DISK)
    subprocess.run(mount, check=True)
    try:
        target = SnapshotStore(where / "snapshots", keep_last=2)
        if not probed:
            monkeypatch.setattr(SnapshotStore, "_check_space", lambda *_: None)
        with (
            closing(sent(source, 8)) as pieces,
            pytest.raises(OSError, match="No space left") as caught,
        ):
            target.receive(source.manifest(8), pieces)
        assert caught.value.errno == errno.ENOSPC
        assert list(target.directory.iterdir()) == []
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_file_that_may_not_grow(source: SnapshotStore, target: SnapshotStore) -> None:
    with small_files(700), pytest.raises(OSError, match="File too large"):
        target.receive(source.manifest(7), sent(source))
    assert list(target.directory.iterdir()) == []


def test_a_source_that_changes_is_noticed(source: SnapshotStore, target: SnapshotStore) -> None:
    path = source.path_of(7) / TENSORS
    content = path.read_bytes()
    for changed, said in ((content[:-1] + b"?", "SHA-256 has changed"), (content[:-1], "shorter")):
        path.write_bytes(changed)
        with pytest.raises(SnapshotError, match=rf"{re.escape(str(path))} .*{said}"):
            list(sent(source))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(sent(source))
    path.symlink_to(source.path_of(7) / STATE)
    with pytest.raises(OSError, match="symbolic links"):
        list(sent(source))


def test_no_manifest(source: SnapshotStore, tmp_path: Path) -> None:
    assert manifest_text(tmp_path / "nothing") == ""
    (source.path_of(7) / "manifest.json").write_text("{}")
    assert source.manifest(7) == ""


def test_generations_are_noted(source: SnapshotStore, target: SnapshotStore) -> None:
    assert target.generation() == 0
    target.note_generation(3)
    assert (target.generation(), target.steps()) == (3, [])
    for wrong in ("{", "[]", '{"generation": "4"}', '{"generation": -1}', '{"generation": true}'):
        (target.directory / "generation.json").write_text(wrong)
        assert target.generation() == 0
    (target.directory / ".generation.json.abc").touch()
    target.sweep()
    assert [path.name for path in target.directory.iterdir()] == ["generation.json"]


def test_later_snapshots_are_set_aside(source: SnapshotStore, make_snapshot: MakeSnapshot) -> None:
    said: list[str] = []
    publish(source, make_snapshot(9))
    source.set_aside_above(7, said.append)
    assert source.steps() == [7]
    assert len(said) == 1
    assert "the training goes on from step 7" in said[0]
    assert read_snapshot(source.directory / "step-000000000009.superseded").step == 9
