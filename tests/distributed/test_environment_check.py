import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.distributed.environment_check import examine
from paceline.distributed.options import DistOptions
from tests.distributed.test_launcher_variables import HYDRA, SRUN
from tests.support.ports import free_port


def lines(environment: Mapping[str, str], **options: object) -> dict[str, tuple[str, str]]:
    """What was found by its name: state and text."""
    chosen = DistOptions(device="cpu", **options)  # type: ignore[arg-type]
    return {found.what: (found.state, found.text) for found in examine(environment, chosen)}


def test_alone() -> None:
    found = lines({})
    assert found.keys() == {"place", "device"}
    assert found["place"][0] == "ok"
    assert found["device"][1].startswith("cpu: CPU")


def test_rank_0_by_hand() -> None:
    port = free_port()
    found = lines({}, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2, local_rank=0)
    assert found["place"] == (
        "ok",
        "options: rank 0 of 2, local rank 0; workers per node are counted when they meet",
    )
    assert found["meeting"] == ("ok", f"rank 0 will listen at 127.0.0.1:{port}")
    assert found["interface"][1].endswith("127.0.0.1, by route to rank 0")
    assert found["backend"] == ("ok", "gloo")


def test_the_place_of_a_task() -> None:
    found = lines(SRUN | {"MASTER_ADDR": "127.0.0.1"})
    assert found["place"][1] == "slurm: rank 5 of 6, local rank 1 of 2, node 1 of 2"
    assert found["meeting"] == ("ok", "tcp://127.0.0.1:22815, where rank 0 will listen")


@pytest.mark.parametrize(
    ("environment", "options", "what", "text"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, {}, "place", "RANK is 2, but WORLD_SIZE is 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "meeting", "MASTER_ADDR is not set"),
        (
            {"MASTER_ADDR": "203.0.113.7"},
            {"rank": 0, "world_size": 2},
            "meeting",
            "none of this host's addresses",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a.invalid", "MASTER_PORT": "1"},
            {},
            "meeting",
            "'a.invalid' can't be resolved here",
        ),
        (
            {"MASTER_ADDR": "127.0.0.1"},
            {"rank": 1, "world_size": 2, "interface": "eth99"},
            "interface",
            "--interface is eth99, which isn't there",
        ),
        (
            {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth99"},
            {"rank": 1, "world_size": 2},
            "interface",
            "GLOO_SOCKET_IFNAME is eth99, which isn't there",
        ),
        ({}, {"backend": "smddp"}, "backend", "needs SageMaker's library"),
        (
            {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"},
            {},
            "node",
            "start it by torchrun with --nproc-per-node 8",
        ),
    ],
)
def test_faults(
    environment: Mapping[str, str], options: Mapping[str, object], what: str, text: str
) -> None:
    state, told = lines(environment, **options)[what]
    assert state == "fault"
    assert text in told


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        state, text = lines({}, init_method=address, rank=0, world_size=2)["meeting"]
    assert (state, text.partition(": Addr")[0]) == ("fault", f"rank 0 can't listen at {address}")


def test_files(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"

    def found(path: Path) -> tuple[str, str]:
        return lines({}, init_method=f"file://{path}", rank=0, world_size=2)["meeting"]

    assert found(meeting)[0] == "ok"
    assert not meeting.exists()  # nothing was started
    meeting.touch()
    assert found(meeting) == (
        "fault",
        f"{meeting} is there already: remove it, or name a new file for each training",
    )
    assert found(tmp_path / "nowhere" / "meeting")[0] == "fault"


def test_a_contradiction_is_a_warning() -> None:
    found = lines(SRUN | HYDRA | {"MASTER_ADDR": "127.0.0.1"})
    assert found["place"][1].startswith("mpich: rank 1 of 2")
    assert found["also found"] == ("warning", "slurm: rank 5 of 6; mpich counts before it")
    same = lines(SRUN | {"RANK": "5", "WORLD_SIZE": "6", "MASTER_PORT": "29500"})
    assert same["also found"] == ("ok", "slurm: rank 5 of 6")


def test_half_of_a_place_is_a_warning() -> None:
    assert lines({"WORLD_SIZE": "2"})["variables"] == (
        "warning",
        "WORLD_SIZE is set alone and doesn't count: set RANK and WORLD_SIZE, or neither",
    )
