"""Workers that meet in different collectives: the script's fault, told with the place of each."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch.errors.error_records import describe, kind_of
from paceline.launch.errors.failures import WorkerFailure, render, root_cause, silent_failure
from paceline.launch.errors.mismatch import is_mismatch

_GLOO = (
    "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:464] "
    "op.preamble.length <= op.nbytes. 4 vs 0. Received data size doesn't match expected size. Is "
    "there a distributed collective mismatch in your code?"
)
_CRASH = f"""terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  {_GLOO}
Fatal Python error: Aborted

Thread 0x0a (most recent call first):
  File "/usr/lib/python3/site-packages/torch/distributed/x.py", line 5 in all_gather
  File "/me/train.py", line 12 in <module>
  File "<frozen runpy>", line 88 in _run_code

Extension modules: torch._C (total: 1)
"""
_RESET = "third_party/gloo/gloo/transport/tcp/pair.cc:545] Connection reset by peer"
_TRACEBACK = f"""Traceback (most recent call last):
  File "/me/train.py", line 15, in <module>
  File "/usr/lib/python3/site-packages/torch/distributed/x.py", line 5, in all_gather
RuntimeError: {_RESET}
"""
_OUT_OF_MEMORY = _TRACEBACK.replace(f"RuntimeError: {_RESET}", "MemoryError")


def _aborted(crash: str = _CRASH, number: int = signal.SIGABRT) -> WorkerFailure:
    return silent_failure(
        1, -number, host="h", step=6, operation="epoch end", out_of_memory=False, crash=crash
    )


def _lost() -> WorkerFailure:
    found = describe(RuntimeError(_RESET), 0)
    return replace(found, host="h", step=6, operation="evaluate", traceback=_TRACEBACK)


def test_an_abort_by_gloo_is_the_jobs_fault() -> None:
    failure = _aborted()
    assert (failure.kind, failure.signal_name) == ("job", "SIGABRT")
    assert "different collectives" in failure.message
    assert "Extension modules" not in failure.traceback
    assert _aborted("Fatal Python error: Aborted\n").kind == "infrastructure"
    assert _aborted(number=signal.SIGSEGV).kind == "infrastructure"


@pytest.mark.parametrize(
    "text", [_GLOO, "Detected mismatch between collectives on ranks. Rank 0 is running ..."]
)
def test_such_an_exception_is_the_jobs_fault(text: str) -> None:
    assert is_mismatch(text)
    assert kind_of(RuntimeError(text)) == "job"
    assert not is_mismatch(_RESET)
    assert kind_of(RuntimeError(_RESET)) == "infrastructure"


def test_what_each_worker_was_in_is_told_with_its_line() -> None:
    text = render(root_cause([_lost(), _aborted()]), Path("logs"))
    assert text.startswith("The training failed on rank 1 (h, step 6, in epoch end).")
    assert (
        "The workers were in different collectives:\n"
        "  rank 0 on h was in s.evaluate(...) (operation evaluate, step 6), at /me/train.py:15 in "
        "<module>\n"
        "  rank 1 on h was in the exchange at the end of the epoch (operation epoch end, step 6), "
        "at /me/train.py:12 in <module>\n"
        "Each of these is done by all workers together. Make the same calls on every worker"
    ) in text
    assert "gloo" not in text


def test_what_a_worker_failed_by_there_is_not_the_cause() -> None:
    broken = describe(MemoryError(), 0)
    broken = replace(broken, host="h", step=6, operation="evaluate", traceback=_OUT_OF_MEMORY)
    text = render(root_cause([broken, _aborted()]), Path("logs"))
    assert text.startswith(
        "The training failed on rank 1 (h, step 6, in epoch end).\n\nThe workers"
    )
    assert "rank 0 on h was in s.evaluate(...) (operation evaluate, step 6), at /me/tr" in text
    assert "Other workers:\n  rank 0 (h, step 6, in evaluate): MemoryError" in text
    assert "Traceback" not in text
