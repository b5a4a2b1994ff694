"""A snapshot on disk: a directory of `tensors.safetensors`, `state.json` and `manifest.json`.

Reading verifies size and SHA-256 of every file before a tensor is used: a flipped bit is an error,
which neither `torch.load` nor safetensors would notice. Nothing in it can carry code.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.checkpoint.file_writer import write_file
from paceline.checkpoint.host_tensors import GROUPS, HostTensors
from paceline.checkpoint.manifest import (
    KNOWN_FORMATS,
    STATE,
    TENSORS,
    FileEntry,
    Manifest,
    decode_body,
    encode_manifest,
    read_manifest,
)
from paceline.errors import InfrastructureError, SnapshotError
from paceline.files import fsync_directory, mode_within
from paceline.options.quantities import parse_count

JsonObject = Mapping[str, object]
"""What JSON can carry: string keys; strings, finite numbers, booleans, None, lists and objects."""

MANIFEST = "manifest.json"

_GROUP = re.compile(r"[A-Za-z0-9_.-]+")
_MANIFEST_MAX_BYTES = 1 << 20
_STATE_MAX_BYTES = 64 << 20
_STATE_STEP_BYTES = 512
_CHUNK_BYTES = 1 << 20
# What damage to the directory itself looks like; any other OSError is the host's fault, not the
# snapshot's.
_DAMAGE = {errno.ENOENT, errno.EIO, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO}


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All tensors and JSON that are needed to resume exactly."""

    step: int
    """Optimizer steps done."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """Group ("model", "optimizer" ..) -> tensor name -> tensor. Values, types and shapes come back
    exactly; memory format doesn't (tensors are contiguous when read), nor does the tying of
    tensors."""

    state: JsonObject
    """Everything that isn't a tensor. Tuples come back as lists."""


@dataclass(frozen=True, kw_only=True)
class HostSnapshot:
    """A snapshot copied to the host: later steps of the training don't change it any more."""

    step: int
    tensors: HostTensors
    """The copied tensors, as `<group>/<name>`."""
    state: bytes
    """The state as JSON, with spaces at the end."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on disk, manifest included (roughly)."""
        return self.tensors.num_bytes + len(self.state) + 4096


def no_phase(name: str) -> None:
    """Do nothing at a phase of writing (tests put faults here)."""


def copy_to_host(snapshot: Snapshot, reuse: HostTensors | None = None) -> HostSnapshot:
    """Copy a snapshot to the host; the caller may change its tensors and state right after.

    Args:
        reuse: Memory of an earlier copy that nobody reads any more; used where names, types and
            shapes still are the same.

    Raises:
        TypeError: The state isn't plain JSON, or a tensor is of a type that can't be saved.
        ValueError: The state holds NaN or infinity or is too large, or a group's name isn't a plain
            one.
    """
    state = json.dumps(snapshot.state, allow_nan=False, separators=(",", ":")).encode()
    if len(state) > _STATE_MAX_BYTES:
        raise ValueError(f"the state takes {len(state)} bytes; at most {_STATE_MAX_BYTES} fit")
    # As long as the last one where that can be: writing it over that leaves its size alone.
    state += b" " * (-len(state) % _STATE_STEP_BYTES)
    # Tensors are named group/name in one file.
    for group in snapshot.tensors:
        if not _GROUP.fullmatch(group):
            raise ValueError(f"group {group!r} may hold only letters, digits, '_', '.' and '-'")
    tensors = {
        f"{group}/{name}": tensor
        for group, members in snapshot.tensors.items()
        for name, tensor in members.items()
    }
    groups = snapshot.tensors.keys()
    # Memory of an earlier snapshot of the same names, types and shapes saves allocating it.
    kept = reuse if reuse is not None and reuse.fits(tensors, groups) else None
    host = kept or HostTensors(tensors, groups)
    host.fill(tensors)
    return HostSnapshot(step=snapshot.step, tensors=host, state=state)


def write_host_snapshot(
    directory: Path,
    host: HostSnapshot,
    phase: Callable[[str], None] = no_phase,
    *,
    over: bool = False,
) -> None:
    """Write a snapshot and wait until it is durable. Not atomic: `SnapshotStore.publish` is.

    Args:
        directory: A new one, made here with its parent's permissions; or an old snapshot's, which
            no reader looks for any more.
        phase: Called with "begin", each file's name and "synced".
        over: Whether the directory is there already; what can be of its files is written over.

    Raises:
        OSError: The disk is full, or it can't be written; leftovers remain.
    """
    if not over:
        directory.mkdir(mode=mode_within(directory.parent))
    phase("begin")
    # The manifest comes last, with the hashes of what has been written.
    entries = {TENSORS: write_file(directory / TENSORS, host.tensors.chunks(), over=over)}
    phase(TENSORS)
    entries[STATE] = write_file(directory / STATE, [memoryview(host.state)], over=over)
    phase(STATE)
    manifest = encode_manifest(Manifest(step=host.step, files=entries))
    write_file(directory / MANIFEST, [memoryview(manifest)], over=over)
    phase(MANIFEST)
    if not over:
        fsync_directory(directory)
    phase("synced")


def holds_nothing_else(directory: Path) -> bool:
    """Say whether a directory is there and holds the files of a snapshot and nothing else."""
    try:
        names = os.listdir(directory)  # noqa: PTH208  # a third of the time of `iterdir`
    except OSError:
        return False
    return set(names) == {TENSORS, STATE, MANIFEST}


def read_snapshot(directory: Path) -> Snapshot:
    """Verify a snapshot and read it.

    Args:
        directory: The snapshot's own directory, of any name.

    Returns:
        The snapshot; its tensors are on the CPU, contiguous, and share memory with nothing.

    Raises:
        SnapshotError: A file is missing, damaged or not a plain file, or the format version is
            unknown; the message names file and reason.
        InfrastructureError: The host refuses to read it (permissions, too many open files ..).
    """
    manifest = _read_manifest(directory)
    _verify(directory / TENSORS, manifest.files[TENSORS], keep=False)
    state = _verify(directory / STATE, manifest.files[STATE], keep=True)
    tensors = _load(directory / TENSORS)
    return Snapshot(step=manifest.step, tensors=tensors, state=_parse_state(state, directory))


def manifest_text(directory: Path) -> str:
    """Give a snapshot's manifest as it was written; its files aren't verified here.

    Two snapshots are the same if and only if their manifests are.

    Args:
        directory: The snapshot's own directory, whether it exists or not.

    Returns:
        The text; empty where there is no undamaged manifest of a known format.
    """
    path = directory / MANIFEST
    try:
        content = _read_small(path)
        read_manifest(content, path)
    except SnapshotError:
        return ""
    return content.decode()


def of_unknown_format(directory: Path) -> bool:
    """Say whether a snapshot is whole but of a format version that this Paceline doesn't know."""
    path = directory / MANIFEST
    try:
        return decode_body(_read_small(path), path)["format"] not in KNOWN_FORMATS
    except SnapshotError:
        return False


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    try:
        links = [entry.name for entry in os.scandir(directory) if entry.is_symlink()]
    except OSError as error:
        raise _unreadable(directory, error) from error
    if links:
        raise SnapshotError(f"{directory / links[0]} is a symbolic link; a snapshot holds none")
    manifest = read_manifest(_read_small(path), path)
    # A directory that was renamed by hand would pass for another step's snapshot.
    name = directory.name
    stated = parse_count(name.removeprefix("step-"))
    if stated is not None and stated != manifest.step:
        raise SnapshotError(f"{path} is of step {manifest.step}, but its directory is {name}")
    return manifest


def _open(path: Path) -> int:
    # O_NONBLOCK: a pipe in place of the file must not hang the reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SnapshotError(f"{path} isn't a plain file")
    return descriptor


def _read_small(path: Path) -> bytes:
    try:
        with os.fdopen(_open(path), "rb") as file:
            content = file.read(_MANIFEST_MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(content) > _MANIFEST_MAX_BYTES:
        raise SnapshotError(
            f"{path} is larger than a manifest can be ({_MANIFEST_MAX_BYTES} bytes)"
        )
    return content


def _verify(path: Path, entry: FileEntry, *, keep: bool) -> bytes:
    if keep and entry.bytes > _STATE_MAX_BYTES:
        raise SnapshotError(f"{path} is larger than a state can be ({_STATE_MAX_BYTES} bytes)")
    digest, kept = hashlib.sha256(), []
    try:
        with os.fdopen(_open(path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            # The size is known at once; a truncated file isn't read.
            if size != entry.bytes:
                raise SnapshotError(f"{path} is damaged: {size} bytes, {entry.bytes} were written")
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                if keep:
                    kept.append(chunk)
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest.hexdigest() != entry.sha256:
        raise SnapshotError(f"{path} is damaged: its SHA-256 isn't the one in {MANIFEST}")
    return b"".join(kept)


@contextmanager
def _named_for_rust(path: Path) -> Iterator[str]:
    """Name a file as safetensors can take it: its names are UTF-8, those of files needn't be."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        descriptor = _open(path)
        try:
            yield f"/dev/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        yield str(path)


def _load(path: Path) -> dict[str, dict[str, Tensor]]:
    try:
        with _named_for_rust(path) as name, safe_open(name, "pt", device="cpu") as file:
            noted: str = (file.metadata() or {}).get(GROUPS, "")
            groups: dict[str, dict[str, Tensor]] = {group: {} for group in noted.split()}
            for key in file.keys():  # noqa: SIM118
                group, _, name = key.partition("/")
                # Without a copy the tensor would stay a view of the mapped file.
                groups.setdefault(group, {})[name] = file.get_tensor(key).clone()
    except (SafetensorError, KeyError) as error:
        raise SnapshotError(f"{path} can't be read: {error}") from error
    return groups


def _parse_state(content: bytes, directory: Path) -> JsonObject:
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{directory / STATE} isn't JSON: {error}") from error
    if not isinstance(state, dict):
        raise SnapshotError(f"{directory / STATE} must hold a JSON object")
    return state


def _unreadable(path: Path, error: OSError) -> SnapshotError | InfrastructureError:
    if error.errno in _DAMAGE:
        reason = "is missing" if error.errno == errno.ENOENT else f"can't be read: {error.strerror}"
        return SnapshotError(f"{path} {reason}")
    return InfrastructureError(f"{path} can't be read: {error.strerror}")
