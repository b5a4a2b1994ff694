import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.errors import (
    DataError,
    InfrastructureError,
    JobError,
    SnapshotError,
    UsageError,
)
from paceline.launch.errors.error_records import (
    describe,
    exit_code_of,
    failure_path,
    kind_of,
    message_of,
    run_guarded,
)
from paceline.launch.errors.failures import WorkerFailure
from paceline.launch.heartbeat import note


class DistNetworkError(RuntimeError):
    """Named as torch's, which isn't imported here."""


class _DerivedError(DistNetworkError):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UsageError("x"), "usage"),
        (JobError("x"), "job"),
        (DataError("x"), "job"),
        (InfrastructureError("x"), "infrastructure"),
        (SnapshotError("x"), "job"),
        (ValueError("x"), "job"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "job"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "job"),
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1"), "infrastructure"),
        (RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed."), "infrastructure"),
        (ConnectionResetError("x"), "infrastructure"),
        (TimeoutError("x"), "infrastructure"),
        (_DerivedError("x"), "infrastructure"),
        (FileNotFoundError(errno.ENOENT, "x"), "job"),
        (OSError(errno.ENOSPC, "x"), "infrastructure"),
        (ValueError("connection reset"), "job"),
        (SystemExit(1), "job"),
        (MemoryError(), "job"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."), "job"),
    ],
)
def test_who_is_at_fault(error: BaseException, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(note, "has_begun", False)  # a test before may have trained in this process
    assert kind_of(error) == kind


def test_wrong_usage_is_the_jobs_fault_once_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit code of 2 says that nothing was started."""
    monkeypatch.setattr(note, "has_begun", True)
    assert kind_of(UsageError("x")) == "job"
    failure = describe(UsageError("x"), 0)
    assert (failure.kind, failure.exit_code) == ("job", 65)
    monkeypatch.setattr(note, "has_begun", False)
    assert kind_of(UsageError("x")) == "usage"


def test_exit_codes() -> None:
    assert [exit_code_of(k) for k in ("usage", "job", "infrastructure")] == [2, 65, 70]


def test_a_result_passes_through(tmp_path: Path) -> None:
    assert run_guarded(str.upper, "abc", tmp_path, 0) == "ABC"
    assert not list(tmp_path.iterdir())


def test_an_exception_leaves_a_record_and_goes_on(tmp_path: Path) -> None:
    def inner(payload: str) -> str:
        raise KeyError(payload)

    def entry(payload: str) -> str:
        try:
            return inner(payload)
        except KeyError as error:
            raise ValueError("unknown") from error

    with pytest.raises(ValueError, match="unknown"):
        run_guarded(entry, "colour", tmp_path, 3)
    record = WorkerFailure.from_json(json.loads(failure_path(tmp_path, 3).read_text()))
    assert (record.rank, record.kind, record.exit_code) == (3, "job", 65)
    assert (record.error_type, record.message) == ("ValueError", "unknown")
    assert "KeyError: 'colour'" in record.traceback
    assert "direct cause" in record.traceback
    assert "run_guarded" not in record.traceback
    assert [path.name for path in tmp_path.iterdir()] == ["failure-rank-3.json"]


_FROM_LOADER = """Caught DataError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "items.py", line 9, in __getitem__
ValueError: DataError: bad

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "items.py", line 11, in __getitem__
paceline.errors.DataError: sample 3 failed: ValueError: DataError: bad
second line
"""


def test_a_data_loaders_wrapping_is_taken_off() -> None:
    message = "sample 3 failed: ValueError: DataError: bad\nsecond line"
    assert message_of(DataError(_FROM_LOADER)) == message
    assert message_of(DataError("as it is: DataError: x")) == "as it is: DataError: x"
    assert describe(DataError(_FROM_LOADER), 0).message == message


def _exit(payload: str) -> str:
    raise SystemExit(payload)


def test_sys_exit_is_a_failure_of_the_job(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run_guarded(_exit, "enough", tmp_path, 0)
    assert "sys.exit('enough')" in json.loads(failure_path(tmp_path, 0).read_text())["message"]


def _interrupt(payload: str) -> str:
    raise KeyboardInterrupt


def test_ctrl_c_is_not_a_failure(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_guarded(_interrupt, "", tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_without_a_place_for_the_record_the_error_still_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_guarded(_exit, "", tmp_path / "missing", 0)
    assert "could not be written" in capsys.readouterr().out


def test_the_gpu_is_asked_once_what_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def mem_get_info() -> None:
        asked.append("memory")
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore")

    cuda = SimpleNamespace(is_initialized=lambda: True, mem_get_info=mem_get_info)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    failure = describe(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), 1)
    assert failure.kind == "infrastructure"
    assert "uncorrectable ECC error" in failure.message
    assert asked == ["memory"]
