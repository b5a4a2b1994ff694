"""Limits of control groups, both versions, also those of groups further up."""

from pathlib import Path

import pytest

from paceline.doctor.probes.machine import CgroupLimits, cgroup_limits


def make(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "cores", "memory"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000"}, 2.0, None),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000000"}, None, 1_000_000),
        ("0::/\n", {"memory.max": "5000\n", "cpu.max": "50000 100000"}, 0.5, 5000),
        ("0::/../gone\n", {}, None, None),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n1:name=systemd:/x\n",
            {
                "memory/x/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.limit_in_bytes": "7000",
                "cpu,cpuacct/x/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3.0,
            7000,
        ),
        (
            "3:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"},
            1.0,
            None,
        ),
    ],
)
def test_limits(
    tmp_path: Path, groups: str, files: dict[str, str], cores: float | None, memory: int | None
) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    make(root, files)
    (tmp_path / "own").write_text(groups)
    found = cgroup_limits(tmp_path / "own", root)
    assert found == CgroupLimits(cores=cores, memory_bytes=memory)


def test_no_control_groups(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path / "none", tmp_path) == CgroupLimits(cores=None, memory_bytes=None)
