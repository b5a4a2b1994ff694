import subprocess
from pathlib import Path

import pytest

from paceline.launch.local import attempt, oom
from paceline.launch.local.oom import oom_killed, oom_kills


@pytest.mark.parametrize(
    ("line", "counter", "content"),
    [
        ("0::/job/one", "job/one/memory.events", "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\n"),
        ("0::/../outside", "memory.events", "oom 4\noom_kill 3\noom_group_kill 0\n"),
        ("4:memory:/job", "memory/job/memory.oom_control", "oom_kill_disable 0\noom_kill 3\n"),
        ("4:cpu,memory:/x", "memory/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_the_counter_is_found(tmp_path: Path, line: str, counter: str, content: str) -> None:
    cgroups = tmp_path / "cgroup"
    cgroups.write_text(f"9:name=systemd:/\n{line}\n")
    path = tmp_path / "sys" / counter
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert oom_kills(cgroups, tmp_path / "sys") == 3


def test_without_a_counter_there_are_none(tmp_path: Path) -> None:
    assert oom_kills(tmp_path / "missing", tmp_path) == 0
    cgroups = tmp_path / "cgroup"
    cgroups.write_text("0::/\n")
    assert oom_kills(cgroups, tmp_path) == 0


def test_here_it_is_what_the_shell_finds() -> None:
    """The cgroup of version 2, of this process or the one that a container takes for the root."""
    look = (
        'path=$(sed -n "s/^0:://p" /proc/self/cgroup); '
        'cat "/sys/fs/cgroup$path/memory.events" /sys/fs/cgroup/memory.events 2>/dev/null'
    )
    said = subprocess.run(["sh", "-c", look], capture_output=True, text=True, check=False).stdout
    counts = [int(line.split()[1]) for line in said.splitlines() if line.startswith("oom_kill ")]
    if not counts:
        pytest.skip("no counter of cgroup version 2 here")
    assert oom_kills() == counts[0]


_LOG = (
    b"6,10,1000000,-;eth0: link up\n",
    b"3,11,5000000,-;Out of memory: Killed process 41 (python) total-vm:1kB, anon-rss:1kB\n",
    b"3,12,9000000,-,caller=T1;Memory cgroup out of memory: Killed process 42 (python) x\n SUB=1\n",
    b"3,13,9500000,-;oom_reaper: reaped process 43 (python), now anon-rss:0kB\n",
)


@pytest.mark.parametrize(("since_s", "found"), [(0.0, {41, 42}), (8.0, {42}), (99.0, set())])
def test_the_kernels_log_names_the_processes(
    tmp_path: Path, since_s: float, found: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(b"".join(_LOG))
    monkeypatch.setattr(oom, "in_first_namespace", lambda kind: True)
    assert set(oom_killed(since_s, log) or ()) == found


def test_a_log_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "in_first_namespace", lambda kind: True)
    assert oom_killed(0, tmp_path / "none") is None
    monkeypatch.setattr(oom, "in_first_namespace", lambda kind: False)
    assert oom_killed(0, Path("/dev/null")) is None


@pytest.mark.parametrize(
    ("logged", "kills", "victims"),
    [(None, 0, frozenset()), (None, 1, None), ({7}, 1, {7}), ({7}, 0, {7}), (set(), 1, set())],
)
def test_evidence_is_about_the_process_where_there_is_any(
    logged: set[int] | None, kills: int, victims: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "oom_killed", lambda since_s: logged)
    assert attempt._victims(0.0, kills) == victims
