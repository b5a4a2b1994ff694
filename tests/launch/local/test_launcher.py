import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from functools import partial
from multiprocessing.synchronize import SemLock
from pathlib import Path

import psutil
import pytest

from paceline.errors import InfrastructureError
from paceline.launch import processes
from paceline.launch.errors.failures import WorkerFailure, render
from paceline.launch.scratch import own_directory
from tests.launch.launching import Launch
from tests.launch.waiting import alive, until

pytestmark = pytest.mark.ranks


def test_results_come_back_by_rank_and_each_worker_knows_its_place(launch: Launch) -> None:
    outcome = launch("describe", "hello", workers=3)
    seen = {rank: json.loads(text) for rank, text in outcome.results.items()}
    assert sorted(seen) == [0, 1, 2]
    assert outcome.failures == ()
    assert (outcome.interrupted, outcome.restarts) == (False, 0)
    for rank, worker in seen.items():
        assert worker["RANK"] == worker["LOCAL_RANK"] == str(rank)
        assert worker["WORLD_SIZE"] == "3"
        assert worker["PACELINE_ATTEMPT"] == "0"
        assert worker["MASTER_ADDR"] == "127.0.0.1"
        assert worker["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
        assert worker["OMP_NUM_THREADS"] == "1"
        assert worker["torch_threads"] == 1


def test_workers_collect_garbage_but_not_among_what_was_imported(launch: Launch) -> None:
    gc.enable()
    for text in launch("describe").results.values():
        seen = json.loads(text)
        assert seen["collects"]
        assert seen["spared"] > 100_000  # torch alone has more objects
    assert gc.isenabled()


@pytest.mark.parametrize("entry", ["describe", "fail"])
@pytest.mark.slow
def test_no_semaphore_outlives_its_attempt(launch: Launch, entry: str) -> None:
    """They go without a garbage collection, which may come where they can't be removed."""

    def semaphores() -> int:
        return sum(issubclass(type(each), SemLock) for each in gc.get_objects())

    gc.collect()
    before = semaphores()
    gc.disable()
    try:
        launch(entry)
        assert semaphores() == before
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        # As where /dev/shm is read-only: torch makes locks there for each worker.
        (errno.EROFS, r"Read-only file system. Workers need a /dev/shm and"),
        (errno.ECONNREFUSED, "the fork server ended"),
    ],
)
def test_a_machine_on_which_no_worker_can_be_started(
    number: int, told: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(SemLock, "__init__", refuse)
    with pytest.raises(InfrastructureError, match=told):
        launch("describe")


def test_two_launches_share_neither_port_nor_run_id(launch: Launch) -> None:
    places = [json.loads(launch("describe").results[0]) for _ in range(2)]
    assert places[0]["TORCHELASTIC_RUN_ID"] != places[1]["TORCHELASTIC_RUN_ID"]


@pytest.mark.parametrize("payload", ["", "killed"])
def test_nobody_else_reaches_the_store_and_nothing_of_it_stays(
    launch: Launch, payload: str
) -> None:
    launch.max_restarts = 1
    outcome = launch("look_at_store", payload, workers=3)
    assert outcome.failures == ()
    assert outcome.restarts == (1 if payload else 0)
    for text in outcome.results.values():
        seen = json.loads(text)
        assert seen["told"] == ["0", "1", "2"]
        assert seen["connect"] == errno.ECONNREFUSED  # there is no port to know
        assert 0o700 in seen["modes"]  # the directory, or the one that it is in
        assert seen["refused"]
        assert not Path(seen["file"]).parent.parent.exists()


def test_plain_pytorch_meets_without_a_port_too(launch: Launch) -> None:
    outcome = launch("plain_groups", workers=3)
    assert [json.loads(text) for text in outcome.results.values()] == [[6.0, 6.0]] * 3


@pytest.mark.slow
def test_output_of_rank_0_is_shown_and_logged_that_of_others_only_logged(tmp_path: Path) -> None:
    logs, outcome = tmp_path / "logs", tmp_path / "outcome.json"
    script = Path(__file__).parents[1] / "launcher.py"
    shown = subprocess.run(
        [sys.executable, str(script), "describe", str(tmp_path), str(logs), str(outcome), "4"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"out of rank 0: {tmp_path}" in shown.stdout
    assert "raw of rank 0" in shown.stdout
    assert "err of rank 0" in shown.stderr
    assert "rank 1" not in shown.stdout + shown.stderr
    assert "noise" not in shown.stdout + shown.stderr
    own = (logs / "rank-0.log").read_text()
    other = (logs / "rank-1.log").read_text()
    assert "attempt 0, rank 0 of 2" in own
    assert f"out of rank 0: {tmp_path}\n" in own
    assert "err of rank 0\n" in own
    assert "noise of rank 0\n" in own
    assert "attempt 0, rank 1 of 2" in other
    for line in (f"out of rank 1: {tmp_path}\n", "err of rank 1\n", "raw of rank 1\n"):
        assert line in other


def test_killed_workers_leave_nothing_in_the_temporary_directory(launch: Launch) -> None:
    before = set(own_directory().iterdir())
    launch("fail_first", "9")
    assert set(own_directory().iterdir()) == before


def test_a_raising_worker_is_the_cause_and_its_traceback_is_whole(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    launch.max_restarts = 3
    outcome = launch("fail", "value")
    cause = outcome.failures[0]
    assert outcome.restarts == 0
    assert outcome.results == {}
    assert (cause.rank, cause.kind, cause.step, cause.operation) == (1, "job", 37, "backward")
    assert (cause.error_type, cause.message) == ("ValueError", "a bad value")
    assert cause.traceback.startswith("Traceback (most recent call last):")
    assert "raise errors[payload]" in cause.traceback
    text = render(outcome.failures, launch.log_dir)
    assert "rank 1" in text
    assert "step 37, in backward" in text
    assert cause.traceback.strip() in text
    record = json.loads((launch.log_dir / "failure-rank-1.json").read_text())
    assert WorkerFailure.from_json(record) == cause
    assert cause.traceback.strip().splitlines()[-1] in (launch.log_dir / "rank-1.log").read_text()
    shown = capfd.readouterr()
    assert "elastic" not in shown.out + shown.err
    assert "ChildFailedError" not in shown.out + shown.err


@pytest.mark.parametrize("payload", ["usage", "job", "sys.exit"])
def test_failures_that_are_the_users_are_not_retried(launch: Launch, payload: str) -> None:
    launch.max_restarts = 3
    outcome = launch("fail", payload)
    assert outcome.restarts == 0
    assert outcome.failures[0].kind == ("usage" if payload == "usage" else "job")
    assert outcome.failures[0].exit_code == (2 if payload == "usage" else 65)
    assert launch.lines == []


@pytest.mark.parametrize("payload", ["infrastructure", "exit"])
def test_infrastructure_failures_are_retried_while_the_budget_lasts(
    launch: Launch, payload: str
) -> None:
    launch.max_restarts = 2
    outcome = launch("fail", payload)
    assert outcome.restarts == 2
    assert outcome.failures[0].kind == "infrastructure"
    assert outcome.failures[0].exit_code == (70 if payload == "infrastructure" else 3)
    assert [line.count("All workers start again") for line in launch.lines] == [1, 1]
    log = (launch.log_dir / "rank-1.log").read_text()
    assert [f"attempt {n}," in log for n in range(4)] == [True, True, True, False]


def test_where_nothing_can_be_written_the_cause_is_kept_and_nothing_is_started_again(
    launch: Launch,
) -> None:
    launch.max_restarts = 3
    outcome = launch("spoil", str(launch.log_dir))
    cause = outcome.failures[0]
    assert (cause.rank, cause.step, cause.message) == (1, 11, "a bad link")
    assert "raise InfrastructureError" in cause.traceback
    assert outcome.restarts == 0
    (line,) = launch.lines
    assert "aren't started again" in line
    assert str(launch.log_dir) in line
    assert "Not a directory" in line


def test_what_would_fail_again_at_once_is_not_retried(launch: Launch) -> None:
    launch.max_restarts = 3
    outcome = launch("fail", "storage")
    assert outcome.restarts == 0
    assert (outcome.failures[0].kind, outcome.failures[0].exit_code) == ("infrastructure", 70)
    assert launch.lines == []


@pytest.mark.parametrize(("ranks", "workers"), [("0", 1), ("1", 2), ("0 1", 2)])
def test_a_worker_that_ends_with_0_before_its_end_is_a_failure(
    launch: Launch, ranks: str, workers: int
) -> None:
    launch.max_restarts = 3
    outcome = launch("leave", ranks, workers=workers)
    cause = outcome.failures[0]
    assert (outcome.restarts, outcome.results, outcome.interrupted) == (0, {}, False)
    # Of two that leave, the second may be stopped before it has left.
    assert {str(failure.rank) for failure in outcome.failures} <= set(ranks.split())
    assert (cause.kind, cause.exit_code, cause.signal_name) == ("job", 0, None)
    assert (cause.step, cause.operation) == (20, "step")
    assert "ended its process with exit code 0 before the end" in cause.message


def test_a_worker_that_ends_with_0_after_its_end_is_none(launch: Launch) -> None:
    assert launch("leave_when_done", workers=1).results == {0: "done"}


@pytest.mark.timeout(120)
def test_a_worker_that_is_done_waits_for_nobody(launch: Launch, tmp_path: Path) -> None:
    """While it did, by an event of multiprocessing, one that was killed there hung the launcher."""
    assert launch("outlive", str(tmp_path), workers=2).results == {0: "last", 1: "first"}


def test_a_worker_that_ends_with_0_before_its_end_leaves_a_record(launch: Launch) -> None:
    cause = launch("leave", "0", workers=1).failures[0]
    record = json.loads((launch.log_dir / "failure-rank-0.json").read_text())
    assert WorkerFailure.from_json(record) == cause


def test_a_killed_worker_is_retried_and_the_launch_succeeds(launch: Launch) -> None:
    launch.max_restarts = 2
    outcome = launch("fail_first", "2")
    assert outcome.results == {0: "attempt 2", 1: "attempt 2"}
    assert outcome.failures == ()
    assert outcome.restarts == 2
    assert not list(launch.log_dir.glob("failure-rank-*.json"))
    record = json.loads((launch.log_dir / "attempt-0-failure-rank-1.json").read_text())
    assert (record["signal_name"], record["step"]) == ("SIGKILL", 7)


def test_progress_refills_the_budget(launch: Launch) -> None:
    steps = iter(range(10))
    launch.max_restarts = 1
    launch.progress = lambda: next(steps)
    assert launch("fail_first", "3").restarts == 3


def test_without_progress_the_budget_runs_out(launch: Launch) -> None:
    launch.max_restarts = 1
    outcome = launch("fail_first", "3")
    assert outcome.restarts == 1
    assert outcome.failures[0].signal_name == "SIGKILL"
    text = render(outcome.failures, launch.log_dir)
    assert "killed by SIGKILL" in text


def test_a_crash_shows_the_fault_handlers_stack(launch: Launch) -> None:
    cause = launch("crash").failures[0]
    assert cause.signal_name == "SIGSEGV"
    assert "Segmentation fault" in cause.traceback
    assert "in crash" in cause.traceback


def test_peers_that_only_note_the_stop_are_killed_and_not_taken_for_an_interrupt(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PEERS_S", 0.2)
    outcome = launch("ignore_stop", str(tmp_path))
    assert not outcome.interrupted
    assert [failure.rank for failure in outcome.failures] == [1]
    pids = [int(path.name.split("-")[2]) for path in tmp_path.glob("ready-*")]
    assert len(pids) == 2
    assert not [pid for pid in pids if alive(pid)]


def test_the_cause_stands_before_the_peers_that_lost_their_connection(launch: Launch) -> None:
    outcome = launch("fail_beside_a_reduce", workers=3)
    cause, *others = outcome.failures
    assert (cause.rank, cause.message) == (1, "only rank 1 knows why")
    assert sorted((other.rank, other.kind) for other in others) == [
        (0, "infrastructure"),
        (2, "infrastructure"),
    ]
    text = render(outcome.failures, launch.log_dir)
    assert text.count("Traceback") == 1
    for other in others:
        lines = [line for line in text.splitlines() if line.startswith(f"  rank {other.rank} (")]
        assert len(lines) == 1
        assert "in all-reduce" in lines[0]


@pytest.mark.slow
def test_workers_killed_at_random_steps_start_again_each_time(
    launch: Launch, tmp_path: Path
) -> None:
    kills, steps = 6, 240
    published = tmp_path / "step"
    launch.progress = lambda: int(published.read_text()) if published.exists() else -1
    launch.max_restarts = kills
    dice = random.Random(2)
    killed: list[int] = []

    def running(attempt: int) -> bool:
        return len(list(tmp_path.glob(f"pid-{attempt}-*"))) == 2

    def kill() -> None:
        for attempt in range(kills):
            until(partial(running, attempt))
            goal = launch.progress() + dice.randint(0, 25)
            until(partial(lambda step: launch.progress() >= step, goal))
            rank = dice.randint(0, 1)
            (path,) = tmp_path.glob(f"pid-{attempt}-{rank}-*")
            os.kill(int(path.name.split("-")[3]), signal.SIGKILL)
            killed.append(rank)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = launch("reduce_in_a_loop", json.dumps([str(tmp_path), steps]))
    killer.join()
    assert len(killed) == kills
    assert outcome.restarts == kills
    for attempt, rank in enumerate(killed):
        path = launch.log_dir / f"attempt-{attempt}-failure-rank-{rank}.json"
        assert json.loads(path.read_text())["signal_name"] == "SIGKILL"
        assert f"rank {rank} " in launch.lines[attempt].splitlines()[0]
    results = [json.loads(text) for text in outcome.results.values()]
    assert [(result["step"], result["sum"]) for result in results] == [(steps, 2.0)] * 2


def test_nothing_listens_beyond_loopback(launch: Launch, tmp_path: Path) -> None:
    outcome = launch("reduce_in_a_loop", json.dumps([str(tmp_path), 2]))
    workers = [json.loads(text)["listening"] for text in outcome.results.values()]
    assert any(workers)
    assert {address for listening in workers for address in listening} == {"127.0.0.1"}


def test_on_one_machine_nothing_listens_for_the_store() -> None:
    from paceline.launch.local.elastic_agent import StaticRendezvous

    def listening() -> set[tuple[str, int]]:
        connections = psutil.Process().net_connections("inet")
        return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}

    before = listening()
    rendezvous = StaticRendezvous(None, 0)
    information = rendezvous.next_rendezvous()
    assert listening() == before
    information.store.set("key", "value")
    assert information.store.get("key") == b"value"
    rendezvous.shutdown()


def test_nothing_is_left_behind(launch: Launch, tmp_path: Path) -> None:
    before = set(own_directory().glob("tmp*"))
    environment = dict(os.environ)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    pids = [json.loads(text)["pid"] for text in launch("describe").results.values()]
    assert not [pid for pid in pids if alive(pid)]
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert set(own_directory().glob("tmp*")) == before
    assert dict(os.environ) == environment
    after = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == handlers
    assert not [t for t in threading.enumerate() if t.name.startswith("paceline")]
