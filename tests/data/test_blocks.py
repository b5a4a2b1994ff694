import os
import re
import signal

import pytest

from paceline.data.blocks import count_cores, run_in_order
from paceline.errors import DataError, InfrastructureError


def _square(value: int) -> int:
    return value * value


def _process(value: int) -> int:
    return os.getpid()


def _fail(value: int) -> int:
    raise DataError(f"sample {value} is broken")


def _decode_block(value: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return value


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_come_in_order(jobs: int) -> None:
    assert list(run_in_order(_square, range(20), jobs)) == [n * n for n in range(20)]


def test_one_job_works_here_and_several_elsewhere() -> None:
    assert set(run_in_order(_process, range(3), 1)) == {os.getpid()}
    assert os.getpid() not in set(run_in_order(_process, range(3), 2))


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_reaches_the_caller(jobs: int) -> None:
    with pytest.raises(DataError, match="sample 0 is broken"):
        list(run_in_order(_fail, range(5), jobs))


def test_a_dying_process_is_told() -> None:
    with pytest.raises(InfrastructureError, match=re.escape("use fewer --jobs")):
        list(run_in_order(_decode_block, range(5), 2))


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 5, 7} if not process else {})
    assert count_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_cores() == 64
