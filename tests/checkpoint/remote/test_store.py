"""Each kind of store keeps what it is given, says so, and notices when it doesn't."""

import hashlib
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from paceline.checkpoint.manifest import FileEntry
from paceline.checkpoint.remote import store as store_module
from paceline.checkpoint.remote.store import DirectoryStore, RemoteStore, entry_of, open_store
from paceline.errors import InfrastructureError, SnapshotError, StoreError, UsageError
from tests.provision.aws.account import Account, own_home, served


class SpoilingFileSystem(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Keeps another last byte than it is given."""

    protocol = "spoiling"
    store: dict[str, Any] = {}  # noqa: RUF012  # as its base has it
    pseudo_dirs = [""]  # noqa: RUF012

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        file = super()._open(path, mode, **options)
        if mode == "rb":
            content = bytearray(file.getvalue())
            content[-1] ^= 1
            return io.BytesIO(content)
        return file


@pytest.fixture(
    scope="module", params=["file", "memory", pytest.param("s3", marks=[pytest.mark.slow])]
)
def account(request: pytest.FixtureRequest) -> Iterator[Account | str]:
    """The kind of store; of S3 the account."""
    if request.param != "s3":
        yield request.param
        return
    with served() as account:
        yield account


@pytest.fixture
def store(
    account: Account | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RemoteStore]:
    if account == "file":
        yield open_store(f"file://{tmp_path}/away/run")
    elif account == "memory":
        yield open_store(f"memory://{secrets.token_hex(4)}/run")
        fsspec.filesystem("memory").store.clear()
    else:
        assert isinstance(account, Account)
        account.reset()
        for name, value in account.environment(own_home(tmp_path / "home")).items():
            monkeypatch.setenv(name, value)
        account.aws().call("s3", "create_bucket", Bucket="bucket")
        yield open_store("s3://bucket/a/run")


def read(store: RemoteStore, name: str) -> bytes:
    return b"".join(store.read(name))


def test_files_are_kept(store: RemoteStore) -> None:
    assert store.names() == []
    content = os.urandom(100_000)
    store.write("snapshots/step-1/x", io.BytesIO(content), entry_of(content))
    store.write_bytes("run.json", b"{}")
    store.write_bytes("run.json", b"{1}")
    assert read(store, "snapshots/step-1/x") == content
    assert read(store, "run.json") == b"{1}"
    assert sorted(store.names()) == ["run.json", "snapshots/step-1/x"]
    store.delete("snapshots/step-1/x")
    store.delete("snapshots/step-1/x")
    assert store.names() == ["run.json"]


def test_a_file_is_created_once(store: RemoteStore) -> None:
    assert store.create("owner", b"first")
    assert not store.create("owner", b"second")
    assert read(store, "owner") == b"first"


def test_what_isnt_there_is_told(store: RemoteStore) -> None:
    with pytest.raises(FileNotFoundError):
        read(store, "nothing")
    assert store.read_small("nothing", 10) is None
    store.write_bytes("large", b"x" * 11)
    with pytest.raises(StoreError, match="larger than 10"):
        store.read_small("large", 10)


def test_a_source_that_changed_leaves_nothing(store: RemoteStore) -> None:
    entry = FileEntry(bytes=3, sha256=hashlib.sha256(b"abc").hexdigest())
    for source in (b"abx", b"ab", b"abcd"):
        with pytest.raises(SnapshotError, match="damaged here, or was changed"):
            store.write("x", io.BytesIO(source), entry)
    assert store.names() == []


def test_changed_bytes_are_noticed() -> None:
    fsspec.register_implementation("spoiling", SpoilingFileSystem, clobber=True)
    store = open_store("spoiling://away/run")
    with pytest.raises(StoreError, match="isn't what was sent"):
        store.write_bytes("x", b"content")


def test_a_directory_keeps_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    store = DirectoryStore(f"file://{tmp_path}", lambda: None)
    store.write_bytes("x", b"old")
    with pytest.raises(SnapshotError):
        store.write("x", io.BytesIO(b"bad"), entry_of(b"new"))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert read(store, "x") == b"old"


def test_a_driver_that_isnt_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="copies at nosuch:// can't be made"):
        open_store("nosuch://x")
    monkeypatch.setattr(store_module, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'paceline\[s3\]'"):
        open_store("s3://bucket/x")


@pytest.mark.slow
@pytest.mark.parametrize("account", ["s3"], indirect=True)
def test_large_files_go_to_s3_in_parts(
    store: RemoteStore, account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_PART_BYTES", 5 << 20)
    monkeypatch.setattr(store_module, "_PARTS_AT_ONCE", 1)
    content = os.urandom((5 << 20) * 2 + 7)
    store.write("x", io.BytesIO(content), entry_of(content))
    assert read(store, "x") == content
    with pytest.raises(SnapshotError):
        store.write("y", io.BytesIO(content[:-1] + b"!"), entry_of(content))
    assert store.names() == ["x"]
    uploads = account.aws().call("s3", "list_multipart_uploads", Bucket="bucket")
    assert not list(uploads["Uploads"])


@pytest.mark.slow
@pytest.mark.parametrize("account", ["s3"], indirect=True)
def test_s3_that_spoils_or_fails_is_noticed(store: RemoteStore, account: Account) -> None:
    account.faults(s3="corrupt", on="/x")
    with pytest.raises(StoreError, match="isn't what was sent"):
        store.write_bytes("x", b"content")
    account.faults(s3="fail", on="/x")
    with pytest.raises(InfrastructureError, match="AWS refused s3:PutObject"):
        store.write_bytes("x", b"content")
    store.write_bytes("z", b"content")
