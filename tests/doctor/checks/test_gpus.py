"""GPUs of one host, and of all."""

import pytest

from paceline.distributed.environment_check import State
from paceline.doctor.checks.gpus import check_gpus, check_same_gpus
from paceline.doctor.checks.machine import Requirements
from paceline.doctor.facts import GpuFacts, HostFacts

GB = 10**9
FOUR = GpuFacts(
    kind="cuda", names=("A10G",) * 4, memory_bytes=(24 * GB,) * 4, free_bytes=(23 * GB,) * 4
)
REQUIRED = Requirements(workers=4, on_gpus=True)


def judged(gpus: GpuFacts, required: Requirements = REQUIRED) -> dict[str, tuple[State, str]]:
    return {f.what: (f.state, f.text) for f in check_gpus("a", gpus, required)}


def test_good_gpus() -> None:
    assert judged(FOUR) == {
        "GPUs": ("ok", "4 x A10G"),
        "GPU copies": ("ok", "right on all links between the GPUs"),
    }
    assert judged(GpuFacts()) == {"GPUs": ("ok", "none")}


def test_more_workers_than_gpus() -> None:
    state, text = judged(FOUR, Requirements(workers=6, on_gpus=True))["GPUs"]
    assert state == "fault"
    assert "Give the host 4 workers" in text


def test_damaged_copies() -> None:
    gpus = GpuFacts(kind="cuda", names=("A", "A"), wrong_copies=("cuda:0 to cuda:1",))
    state, text = judged(gpus, Requirements(workers=2, on_gpus=True))["GPU copies"]
    assert state == "fault"
    assert "cuda:0 to cuda:1" in text
    assert "NCCL_P2P_DISABLE=1" in text


def test_gpus_that_others_use() -> None:
    free = (23 * GB, 2 * GB, 23 * GB, 23 * GB)
    gpus = GpuFacts(kind="cuda", names=FOUR.names, memory_bytes=FOUR.memory_bytes, free_bytes=free)
    assert judged(gpus)["GPU memory"] == (
        "warning",
        "something else uses GPU 1 22 GB: nvidia-smi shows what. End it",
    )


def test_gpus_that_fail() -> None:
    assert judged(GpuFacts(problem="no driver"))["GPUs"][0] == "fault"


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({"a": ("A",), "b": ("A",), "c": ("A",)}, []),
        ({"a": ("A",), "b": ("B",), "c": ("A",)}, [("b", "warning")]),
        ({"a": ("A",), "b": (), "c": ("A",)}, [("b", "fault")]),
        ({"a": ("A", "A"), "b": ("A",), "c": ("A",)}, []),
        ({"a": ("A", "B"), "b": ("A",), "c": ("A",)}, [("a", "warning")]),
        ({"a": (), "b": ()}, []),
        ({}, []),
    ],
)
def test_models(models: dict[str, tuple[str, ...]], expected: list[tuple[str, str]]) -> None:
    facts = {
        host: HostFacts(gpus=GpuFacts(kind="cuda" if names else "", names=names))
        for host, names in models.items()
    }
    assert [(f.hosts[0], f.state) for f in check_same_gpus(facts)] == expected
