"""What facts of one host mean."""

from dataclasses import replace

import pytest

from paceline.distributed.environment_check import State
from paceline.doctor.checks.machine import Requirements, check_machine, workers_on
from paceline.doctor.facts import (
    DiskFacts,
    GpuFacts,
    HostFacts,
    LimitFacts,
    MachineFacts,
)

GB = 10**9
GOOD = HostFacts(
    machine=MachineFacts(
        cores=8, memory_bytes=64 * GB, available_bytes=60 * GB, steal_share=0.0, busy_cores=0.1
    ),
    limits=LimitFacts(open_files=1024, locked_bytes=8 << 20, shared_memory_bytes=32 * GB),
    disk=DiskFacts(
        directory="/data", free_bytes=500 * GB, total_bytes=900 * GB, write_bytes_per_s=4e8
    ),
)
REQUIRED = Requirements(workers=4, on_gpus=True, loader_workers=2, world_size=8)


def states(facts: HostFacts, required: Requirements = REQUIRED) -> dict[str, State]:
    return {found.what: found.state for found in check_machine("a", facts, required)}


def bad(facts: HostFacts, required: Requirements = REQUIRED) -> dict[str, State]:
    return {what: state for what, state in states(facts, required).items() if state != "ok"}


def text_of(facts: HostFacts, what: str, required: Requirements = REQUIRED) -> str:
    return next(f.text for f in check_machine("a", facts, required) if f.what == what)


def test_a_good_host_is_good() -> None:
    assert bad(GOOD) == {}
    assert set(states(GOOD)) == {
        "cores",
        "steal",
        "load",
        "memory",
        "/dev/shm",
        "open files",
        "disk",
    }


@pytest.mark.parametrize(
    ("change", "what", "state", "words"),
    [
        ({"quota_cores": 1.5}, "cores", "warning", "1.5 of 8 cores"),
        ({"steal_share": 0.05}, "steal", "warning", "5.0 %"),
        ({"steal_share": 0.6}, "steal", "fault", "60 %"),
        ({"busy_cores": 6.0, "busiest": ("ffmpeg (7) 590%",)}, "load", "warning", "ffmpeg (7)"),
        ({"available_bytes": 2 * GB}, "memory", "warning", "4 workers need 4.0 GB"),
        ({"limit_bytes": GB}, "memory", "warning", "the control group allows 1.0 GB"),
        (
            {"swap_used_bytes": 9 * GB, "available_bytes": 6 * GB},
            "memory",
            "warning",
            "9.0 GB are swapped out",
        ),
    ],
)
def test_the_machine(change: dict[str, object], what: str, state: State, words: str) -> None:
    facts = replace(GOOD, machine=replace(GOOD.machine, **change))  # type: ignore[arg-type]
    assert bad(facts) == {what: state}
    assert words in text_of(facts, what)


@pytest.mark.parametrize(
    ("change", "what", "state", "words"),
    [
        ({"open_files": 256}, "open files", "warning", "ulimit -n"),
        ({"shared_memory_bytes": 64 << 20}, "/dev/shm", "warning", "--shm-size"),
        ({"shared_memory_bytes": 1000 << 20}, "/dev/shm", "warning", "16 of them may fill 1.1 GB"),
        ({"rdma_devices": ("efa_0",)}, "locked memory", "fault", "efa_0"),
    ],
)
def test_limits(change: dict[str, object], what: str, state: State, words: str) -> None:
    facts = replace(GOOD, limits=replace(GOOD.limits, **change))  # type: ignore[arg-type]
    assert bad(facts) == {what: state}
    assert words in text_of(facts, what)


def test_what_is_unlimited_is_enough() -> None:
    limits = LimitFacts(open_files=None, locked_bytes=None, rdma_devices=("mlx5_0",))
    facts = replace(GOOD, limits=limits)
    assert bad(facts) == {}
    assert states(facts)["locked memory"] == "ok"


@pytest.mark.parametrize(
    ("change", "state", "words"),
    [
        ({"problem": "Read-only file system"}, "fault", "Read-only file system"),
        ({"free_bytes": 10**8}, "fault", "no room"),
        ({"free_bytes": 3 * GB}, "warning", "--keep-last"),
        ({"write_bytes_per_s": 5e6}, "warning", "200 s"),
    ],
)
def test_the_disk(change: dict[str, object], state: State, words: str) -> None:
    facts = replace(GOOD, disk=replace(GOOD.disk, **change))  # type: ignore[arg-type]
    assert bad(facts) == {"disk": state}
    assert words in text_of(facts, "disk")


def test_small_shared_memory_is_enough_where_nobody_uses_it() -> None:
    small = replace(GOOD, limits=replace(GOOD.limits, shared_memory_bytes=64 << 20))
    assert bad(small, replace(REQUIRED, on_gpus=False, loader_workers=0)) == {}


def test_more_cpu_workers_than_cores() -> None:
    required = replace(REQUIRED, on_gpus=False, workers=16)
    assert bad(GOOD, required) == {"cores": "warning"}
    assert bad(GOOD, replace(required, on_gpus=True)) == {}


def test_a_missing_directory_is_a_fault_for_a_training_only() -> None:
    facts = replace(GOOD, disk=replace(GOOD.disk, missing="/home/me/work"))
    assert bad(facts) == {"directory": "warning"}
    assert bad(facts, replace(REQUIRED, has_recipe=True)) == {"directory": "fault"}


def test_what_could_not_be_found_out_is_said_and_not_judged() -> None:
    facts = HostFacts(unknown={"machine": "OSError: no", "limits": "x", "disk": "y"})
    assert states(facts) == {"machine": "warning", "limits": "warning", "disk": "warning"}


def test_workers_of_a_host() -> None:
    gpus = replace(GOOD, gpus=GpuFacts(kind="cuda", names=("A", "A", "A")))
    assert workers_on(gpus, None, on_gpus=True) == (3, True)
    assert workers_on(gpus, 2, on_gpus=True) == (2, True)
    assert workers_on(gpus, None, on_gpus=False) == (2, False)
    assert workers_on(GOOD, None, on_gpus=True) == (2, False)
