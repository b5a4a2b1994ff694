import json
from pathlib import Path

import pytest

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import FileEntry, Manifest, decode_body, encode_manifest
from paceline.errors import SnapshotError

PATH = Path("step/manifest.json")
ENTRY = FileEntry(bytes=3, sha256="ab" * 32)
GOOD = Manifest(step=12, files={"tensors.safetensors": ENTRY, "state.json": ENTRY})


def parse(content: bytes) -> Manifest:
    return manifest.read_manifest(content, PATH)


def signed(body: object) -> bytes:
    return manifest._encode(body)  # type: ignore[arg-type]  # bodies that are no manifests


def test_round_trip() -> None:
    assert parse(encode_manifest(GOOD)) == GOOD


def test_it_is_readable_json_with_the_contracted_entries() -> None:
    content = json.loads(encode_manifest(GOOD))
    assert content["format"] == 2
    assert content["files"]["state.json"] == {"bytes": 3, "sha256": "ab" * 32}
    assert len(content["sha256"]) == 64


def test_every_single_bit_counts() -> None:
    content = encode_manifest(GOOD)
    for position in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            with pytest.raises(SnapshotError, match="is damaged"):
                decode_body(bytes(flipped), PATH)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null", b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_manifest_is_damaged(content: bytes) -> None:
    with pytest.raises(SnapshotError, match="is damaged"):
        decode_body(content, PATH)


def test_an_unknown_format_says_which_are_known() -> None:
    with pytest.raises(SnapshotError, match=r"format version 7; this Paceline knows: 2\."):
        parse(signed({"format": 7, "anything": "else"}))


@pytest.mark.parametrize(
    "name", ["../tensors.safetensors", "a/b.safetensors", "..", "x.bin", "", "model.safetensors"]
)
def test_other_files_than_a_snapshots_two_are_refused(name: str) -> None:
    entry = {"bytes": 1, "sha256": "ab" * 32}
    both = {"tensors.safetensors": entry, "state.json": entry}
    for files in ({name: entry}, {**both, name: entry}, {"state.json": entry, name: entry}):
        with pytest.raises(SnapshotError, match=r"must name tensors\.safetensors and state\.json"):
            parse(signed({"format": 2, "step": 1, "files": files}))


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"bytes": 1},
        {"bytes": -1, "sha256": "ab" * 32},
        {"bytes": True, "sha256": "ab" * 32},
        {"bytes": 1, "sha256": "AB" * 32},
        {"bytes": 1, "sha256": "ab" * 32, "more": 1},
    ],
)
def test_entries_that_cant_be_are_refused(entry: object) -> None:
    good = {"bytes": 1, "sha256": "ab" * 32}
    files = {"tensors.safetensors": good, "state.json": entry}
    with pytest.raises(SnapshotError, match=r"entry of state\.json|of state\.json can't be"):
        parse(signed({"format": 2, "step": 1, "files": files}))


@pytest.mark.parametrize("body", [{"format": 2}, {"format": 2, "step": "1", "files": {}}])
def test_missing_entries_are_refused(body: object) -> None:
    with pytest.raises(SnapshotError, match="isn't a manifest"):
        parse(signed(body))
