import json
from pathlib import Path

import pytest

from paceline.checkpoint import manifest
from paceline.checkpoint.manifest import FileEntry, Manifest, decode_body, encode_manifest
from paceline.errors import SnapshotError

PATH = Path("step/manifest.json")
ENTRY = FileEntry(bytes=3, sha256="ab" * 32)
GOOD = Manifest(step=12, files={"model.safetensors": ENTRY, "state.json": ENTRY})


def parse(content: bytes) -> Manifest:
    return manifest.parse_manifest(decode_body(content, PATH), PATH)


def signed(body: object) -> bytes:
    return manifest._encode(body)  # type: ignore[arg-type]  # bodies that are no manifests


def test_round_trip() -> None:
    assert parse(encode_manifest(GOOD)) == GOOD


def test_it_is_readable_json_with_the_contracted_entries() -> None:
    content = json.loads(encode_manifest(GOOD))
    assert content["format"] == 1
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
    with pytest.raises(SnapshotError, match=r"format version 7; this Paceline knows: 1\."):
        parse(signed({"format": 7, "anything": "else"}))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "a/b.safetensors", "..", "x.bin", "", "a b.safetensors", "s\n"]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    files = {name: {"bytes": 1, "sha256": "ab" * 32}}
    with pytest.raises(SnapshotError, match=r"names a file that can't be in a snapshot"):
        parse(signed({"format": 1, "step": 1, "files": files}))


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
    with pytest.raises(SnapshotError, match=r"state\.json"):
        parse(signed({"format": 1, "step": 1, "files": {"state.json": entry}}))


@pytest.mark.parametrize("body", [{"format": 1}, {"format": 1, "step": "1", "files": {}}])
def test_missing_entries_are_refused(body: object) -> None:
    with pytest.raises(SnapshotError, match="isn't a manifest"):
        parse(signed(body))
