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


def test_here_it_can_be_asked() -> None:
    assert oom_kills() >= 0
