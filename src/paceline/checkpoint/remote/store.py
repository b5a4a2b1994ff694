"""Remote storage backends: files are written whole and verified, listed, read, deleted.

S3 goes by boto3, which `paceline aws` uses as well: s3fs pins botocore to an older version than
boto3 needs, so that the two can't be installed together at their newest. Directories are written
durably by ourselves; all others go by fsspec, which comes with torch, and the driver for the URL.
"""

import base64
import hashlib
import io
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, final

from paceline.checkpoint.manifest import FileEntry
from paceline.checkpoint.remote.url import reason_of
from paceline.errors import SnapshotError, StoreError, UsageError
from paceline.files import replacing
from paceline.launch.aws_client import AwsError, connect
from paceline.launch.json_fields import Answer

_PIECE_BYTES = 8 << 20
_WRITING = ".writing-"
# S3 takes at most 10,000 parts, each of at least 5 MiB but the last.
_PART_BYTES, _MAX_PARTS, _PARTS_AT_ONCE = 16 << 20, 10_000, 4

Progress = Callable[[], None]
"""Called whenever something has gone on: a store that hangs is known by its silence."""


class RemoteStore(ABC):
    """Files below one URL, by names with slashes. What fails raises errors of any kind."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    @abstractmethod
    def write(self, name: str, source: BinaryIO, entry: FileEntry) -> None:
        """Store a file whole in place of an older one, and verify what is stored.

        Raises:
            StoreError: What is stored differs from what was sent.
            SnapshotError: The source isn't what the entry says.
        """

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Store a small file unless there is one. Returns whether there was none."""

    @abstractmethod
    def read(self, name: str) -> Iterator[bytes]:
        """Give a file's bytes, a piece after the other.

        Raises:
            FileNotFoundError: There is none.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """List the files that are there."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file; one that isn't there is no error."""

    def write_bytes(self, name: str, content: bytes) -> None:
        """Store a small file; see `write`."""
        self.write(name, io.BytesIO(content), entry_of(content))

    def read_small(self, name: str, most_bytes: int) -> bytes | None:
        """Read a small file whole; None where there is none.

        Raises:
            StoreError: It is larger.
        """
        content = b""
        try:
            for piece in self.read(name):
                content += piece
                if len(content) > most_bytes:
                    raise StoreError(f"{name} there is larger than {most_bytes:,} bytes")
        except FileNotFoundError:
            return None
        return content

    def verify_by_reading(self, name: str, entry: FileEntry) -> None:
        """Read a file back, and hold it against what was sent.

        Raises:
            StoreError: It differs.
        """
        digest, size = hashlib.sha256(), 0
        for piece in self.read(name):
            digest.update(piece)
            size += len(piece)
            self.progress()
        if FileEntry(bytes=size, sha256=digest.hexdigest()) != entry:
            raise StoreError(f"what is stored as {name} isn't what was sent: its bytes differ")

    def checked(self, name: str, source: BinaryIO, entry: FileEntry, size: int) -> Iterator[bytes]:
        """Give a source's bytes in pieces of a size; after the last, check that they were right.

        Raises:
            SnapshotError: They weren't: nothing of them may stay.
        """
        digest, count = hashlib.sha256(), 0
        while piece := source.read(size):
            digest.update(piece)
            count += len(piece)
            self.progress()
            yield piece
        if FileEntry(bytes=count, sha256=digest.hexdigest()) != entry:
            raise SnapshotError(f"{name} is damaged here, or was changed while it was copied")


def entry_of(content: bytes) -> FileEntry:
    """Give size and hash of a small file."""
    return FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


@final
class DirectoryStore(RemoteStore):
    """A directory of this host: another disk, a network file system."""

    def __init__(self, url: str, progress: Progress) -> None:
        super().__init__(progress)
        self._root = Path(url.removeprefix("file://"))

    def write(self, name: str, source: BinaryIO, entry: FileEntry) -> None:
        """Write under another name, sync, rename, and read it back."""
        path, writing = self._place(name)
        with replacing(path, temporary=writing) as file:
            for piece in self.checked(name, source, entry, _PIECE_BYTES):
                file.write(piece)
        self.verify_by_reading(name, entry)

    def create(self, name: str, content: bytes) -> bool:
        """Link it to its name, which fails where there is one."""
        path, writing = self._place(name)
        writing.write_bytes(content)
        try:
            os.link(writing, path)
        except FileExistsError:
            return False
        finally:
            writing.unlink()
        return True

    def read(self, name: str) -> Iterator[bytes]:
        """Read it."""
        with (self._root / name).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def names(self) -> list[str]:
        """List all below, but files that are being written."""
        paths = (path for path in self._root.rglob("*") if path.is_file())
        return [
            path.relative_to(self._root).as_posix()
            for path in paths
            if not path.name.startswith(_WRITING)
        ]

    def delete(self, name: str) -> None:
        """Delete it, and its directory where that is empty then."""
        (self._root / name).unlink(missing_ok=True)
        with suppress(OSError):
            (self._root / name).parent.rmdir()

    def _place(self, name: str) -> tuple[Path, Path]:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, path.with_name(f"{_WRITING}{path.name}-{secrets.token_hex(4)}")


@final
class FsspecStore(RemoteStore):
    """What fsspec has a driver for: gs, abfs, hf, sftp and others."""

    def __init__(self, url: str, progress: Progress) -> None:
        super().__init__(progress)
        import fsspec

        # Nothing that this process or another one has listed before counts.
        options = {"skip_instance_cache": True, "use_listings_cache": False}
        self._files, self._root = fsspec.core.url_to_fs(url, **options)

    def write(self, name: str, source: BinaryIO, entry: FileEntry) -> None:
        """Write it, and read it back: not every driver has a checksum that the store computed."""
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            with self._files.open(path, "wb") as file:
                for piece in self.checked(name, source, entry, _PIECE_BYTES):
                    file.write(piece)
        except SnapshotError:
            self.delete(name)  # closing has stored what there was
            raise
        self.verify_by_reading(name, entry)

    def create(self, name: str, content: bytes) -> bool:
        """Check, then write: few drivers can do both atomically.

        Of two that write at the same moment the later one stays; the other finds that out before
        it copies a snapshot.
        """
        if self._files.exists(self._path(name)):
            return False
        self.write_bytes(name, content)
        return True

    def read(self, name: str) -> Iterator[bytes]:
        """Read it."""
        with self._files.open(self._path(name), "rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def names(self) -> list[str]:
        """List all below."""
        try:
            paths = self._files.find(self._root)
        except FileNotFoundError:
            return []
        start = f"{self._root.rstrip('/')}/"
        return [path.removeprefix(start) for path in paths if path.startswith(start)]

    def delete(self, name: str) -> None:
        """Delete it."""
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


@final
class S3Store(RemoteStore):
    """A prefix of a bucket of Amazon S3, or of a store that speaks its language."""

    def __init__(self, url: str, progress: Progress) -> None:
        super().__init__(progress)
        self._bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self._aws = connect()

    def write(self, name: str, source: BinaryIO, entry: FileEntry) -> None:
        """Send it with SHA-256 sums, which the store checks; where it doesn't say so, read back."""
        part = max(_PART_BYTES, -(-entry.bytes // _MAX_PARTS))
        if entry.bytes <= part:
            content = b"".join(self.checked(name, source, entry, part))
            checksum = _base64(bytes.fromhex(entry.sha256))
            self._call("put_object", name, Body=content, ChecksumSHA256=checksum)
        else:
            checksum = self._write_parts(name, self.checked(name, source, entry, part))
        self.progress()
        response = self._call("head_object", name, ChecksumMode="ENABLED")
        if (response.text("ChecksumSHA256"), response.count("ContentLength")) != (
            checksum,
            entry.bytes,
        ):
            self.verify_by_reading(name, entry)

    def create(self, name: str, content: bytes) -> bool:
        """Put it on the condition that there is none."""
        try:
            self._call("put_object", name, Body=content, IfNoneMatch="*")
        except AwsError as error:
            if error.code in ("PreconditionFailed", "ConditionalRequestConflict"):
                return False
            raise
        return True

    def read(self, name: str) -> Iterator[bytes]:
        """Get it as a stream."""
        try:
            body: Any = self._call("get_object", name).raw("Body")
        except AwsError as error:
            if error.code in ("NoSuchKey", "404"):
                raise FileNotFoundError(name) from error
            raise
        with body:
            while piece := body.read(_PIECE_BYTES):
                yield piece

    def names(self) -> list[str]:
        """List all below, by pages of a thousand."""
        start = self._key("")
        listed = self._aws.pages(
            "s3", "list_objects_v2", "Contents", Bucket=self._bucket, Prefix=start
        )
        return [entry.text("Key").removeprefix(start) for entry in listed]

    def delete(self, name: str) -> None:
        """Delete it."""
        self._call("delete_object", name)

    def _write_parts(self, name: str, pieces: Iterator[bytes]) -> str:
        """Send a large file in parts, several at once. Returns the checksum that it should have."""
        began = self._call("create_multipart_upload", name, ChecksumAlgorithm="SHA256")
        upload = began.text("UploadId")
        parts: list[Mapping[str, object]] = []
        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
                waiting: list[Future[Mapping[str, object]]] = []
                for number, piece in enumerate(pieces, 1):
                    waiting.append(pool.submit(self._send_part, name, upload, number, piece))
                    if len(waiting) == _PARTS_AT_ONCE:  # no more of them in memory
                        parts.append(waiting.pop(0).result())
                parts += [each.result() for each in waiting]
            whole = {"UploadId": upload, "MultipartUpload": {"Parts": parts}}
            self._call("complete_multipart_upload", name, **whole)
        except BaseException:
            with suppress(Exception):  # parts that stay cost money; what went wrong counts more
                self._call("abort_multipart_upload", name, UploadId=upload)
            raise
        digests = b"".join(base64.b64decode(str(part["ChecksumSHA256"])) for part in parts)
        return f"{_base64(hashlib.sha256(digests).digest())}-{len(parts)}"

    def _send_part(self, name: str, upload: str, number: int, piece: bytes) -> Mapping[str, object]:
        checksum = _base64(hashlib.sha256(piece).digest())
        about = {"UploadId": upload, "PartNumber": number, "ChecksumSHA256": checksum}
        sent = self._call("upload_part", name, Body=piece, **about)
        self.progress()
        return {"ETag": sent.text("ETag"), "PartNumber": number, "ChecksumSHA256": checksum}

    def _call(self, operation: str, name: str, **arguments: object) -> Answer:
        key = self._key(name)
        return self._aws.call("s3", operation, Bucket=self._bucket, Key=key, **arguments)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name


def open_store(url: str, progress: Progress = lambda: None) -> RemoteStore:
    """Open the store of a URL that `check_url` has passed. Little is asked of it yet.

    Args:
        url: Below which all names are.

    Raises:
        UsageError: What it needs isn't installed, or there are no credentials.
    """
    scheme = url.partition("://")[0]
    # Two schemes have stores of our own, all others are fsspec's.
    if scheme == "file":
        return DirectoryStore(url, progress)
    if scheme == "s3":
        if find_spec("boto3") is None:
            raise UsageError("copies at s3:// need an extra: pip install 'paceline[s3]'")
        return S3Store(url, progress)
    try:
        return FsspecStore(url, progress)
    except ImportError as error:
        raise UsageError(
            f"copies at {scheme}:// need a driver of fsspec that isn't installed: "
            f"{reason_of(error)}"
        ) from error
    except ValueError as error:
        raise UsageError(f"copies at {scheme}:// can't be made: {reason_of(error)}") from error


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
