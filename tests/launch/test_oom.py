import subprocess
from pathlib import Path

import pytest

from paceline.launch.oom import oom_kills


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
