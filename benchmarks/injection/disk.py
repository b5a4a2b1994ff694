"""Faults of the run directory while a training runs: full, read-only, gone, moved, a power cut."""

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.injection.kind import Kind, struck
from benchmarks.injection.training import Training

_EXT4_IOC_SHUTDOWN = 0x8004587D  # linux/fs/ext4/ext4.h: _IOR('X', 125, __u32)
_WITHOUT_THE_JOURNAL = 2
_FAILS = (70, 75)
"""Worth a retry: what is lacking is no fault of the training."""
_NO_FINAL = r"(could not be written|can't be written|No space|not permitted).*"


def mount(*words: str) -> None:
    """Mount something; it is gone with this process's namespace at the latest."""
    subprocess.run(["mount", *words], check=True, capture_output=True)


def unmount(path: Path) -> None:
    """Unmount it."""
    subprocess.run(["umount", str(path)], check=True, capture_output=True)


@cache
def no_mounts() -> str:
    """Say why nothing can be mounted here."""
    words = "unshare --mount --propagation private mount -t tmpfs tmpfs /mnt"
    return "" if _works(words) else "mounting in a namespace of its own (root)"


@cache
def no_loop_device() -> str:
    """Say why no ext4 image can be mounted here."""
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as scratch:
        image = f"{scratch}/image"
        script = f"truncate -s 16M {image} && mkfs.ext4 -q {image} && mount -o loop {image} /mnt"
        if _works("unshare --mount --propagation private sh -c", script):
            return ""
    return "ext4 images (root, loop devices, e2fsprogs)"


@cache
def no_immutable() -> str:
    """Say why no directory can be made immutable here."""
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as scratch:
        works = _works(f"chattr +i {scratch}")
        _works(f"chattr -i {scratch}")
    return "" if works else "immutable directories (root, e2fsprogs, ext4)"


def _works(words: str, *more: str) -> bool:
    try:
        done = subprocess.run([*words.split(), *more], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


# A small disk.


def _small_disk(training: Training) -> None:
    disk = training.room / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk))
    training.run_dir = disk / "run"


def _fill(training: Training) -> None:
    with (training.room / "disk" / "filler").open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass


def _free(training: Training) -> None:
    (training.room / "disk" / "filler").unlink(missing_ok=True)


def _fill_for_a_while(training: Training) -> None:
    _fill(training)
    training.release()
    time.sleep(training.drawn.delay_s)
    _free(training)


# Directories that change under it.


def _immutable(training: Training) -> None:
    subprocess.run(["chattr", "+i", str(training.run_dir / "snapshots")], check=True)


def _mutable(training: Training) -> None:
    subprocess.run(["chattr", "-i", str(training.run_dir / "snapshots")], check=True)


def _replace_by_file(training: Training) -> None:
    snapshots = training.run_dir / "snapshots"
    snapshots.rename(training.room / "kept")
    snapshots.write_text("not a directory\n")


def _put_back(training: Training) -> None:
    snapshots = training.run_dir / "snapshots"
    snapshots.unlink(missing_ok=True)
    (training.room / "kept").rename(snapshots)


def _read_only(training: Training) -> None:
    run = str(training.run_dir)
    mount("--bind", run, run)
    mount("-o", "remount,ro,bind", run)


def _writable(training: Training) -> None:
    unmount(training.run_dir)


def _remove(training: Training) -> None:
    while training.run_dir.exists():  # the training writes meanwhile
        shutil.rmtree(training.run_dir, ignore_errors=True)


def _begin_anew(training: Training) -> None:
    shutil.rmtree(training.run_dir, ignore_errors=True)


def _move(training: Training) -> None:
    training.run_dir.rename(training.room / "moved")


def _move_back(training: Training) -> None:
    shutil.rmtree(training.run_dir, ignore_errors=True)  # what it wrote to where that was
    (training.room / "moved").rename(training.run_dir)


# The power.


def _ext4(training: Training) -> None:
    image, disk = training.room / "image", training.room / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    disk.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mount("-o", "loop", str(image), str(disk))
    training.run_dir = disk / "run"


def _cut_the_power(training: Training) -> None:
    """Lose all that isn't on the disk, and end all processes at once."""
    training.release()
    time.sleep(training.drawn.delay_s / 3)
    disk = training.room / "disk"
    unrelated = disk / "unrelated"
    with unrelated.open("wb") as file:  # commits the journal: unsynced files show as empty
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(disk, os.O_RDONLY)
    fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _WITHOUT_THE_JOURNAL))
    os.close(descriptor)
    training.signal(signal.SIGKILL, training.launcher, *training.workers())


def _power_on(training: Training) -> None:
    disk = training.room / "disk"
    unmount(disk)
    mount("-o", "loop", str(training.room / "image"), str(disk))
    (disk / "unrelated").unlink(missing_ok=True)


KINDS: Sequence[Kind] = (
    struck(
        "the disk full for a moment",
        _fill_for_a_while,
        before=_small_disk,
        says="Finished",
        needs=no_mounts,
    ),
    struck(
        "the disk full until the end",
        _fill,
        before=_small_disk,
        after=_free,
        codes=_FAILS,
        says="No space left on device",
        needs=no_mounts,
    ),
    struck(
        "snapshots/ immutable",
        _immutable,
        after=_mutable,
        codes=_FAILS,
        says=r"(Operation not permitted|can't be written)",
        needs=no_immutable,
    ),
    struck(
        "snapshots/ replaced by a file",
        _replace_by_file,
        after=_put_back,
        codes=_FAILS,
        says=r"(Not a directory|File exists)",
    ),
    struck(
        "the run directory read-only",
        _read_only,
        after=_writable,
        codes=_FAILS,
        says="Read-only file system",
        needs=no_mounts,
    ),
    struck(
        "the run directory removed",
        _remove,
        after=_begin_anew,
        codes=_FAILS,
        says="the run directory was removed, moved|No such file",
    ),
    struck(
        "the run directory moved",
        _move,
        after=_move_back,
        codes=_FAILS,
        says="the run directory was removed, moved|No such file",
    ),
    struck(
        "a power cut",
        _cut_the_power,
        before=_ext4,
        after=_power_on,
        codes=(-9,),
        needs=no_loop_device,
    ),
)
