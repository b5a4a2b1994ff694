import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.process_tree import in_first_namespace
from tests.launch.waiting import alive, until
from tests.support.needs import PROCESS_NAMESPACES, need

_CODE = """
import os, subprocess, sys
from paceline.launch.process_tree import die_with_parent
if sys.argv[1] == "parent":
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "child", str(os.getpid())])
    print(child.pid, flush=True)
else:
    die_with_parent(int(sys.argv[2]))
    os.write(1, b"tied\\n")
input()
"""


def _start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CODE, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_child_ends_with_its_parent() -> None:
    with _start("parent", _CODE) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline(), parent.stdout.readline()]
        (child,) = [int(line) for line in lines if line.strip().isdecimal()]
        assert "tied\n" in lines
        parent.kill()
        until(lambda: not alive(child))


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    with _start("child", str(os.getpid() + 1_000_000)) as child:
        out, _ = child.communicate()
        assert (child.returncode, out) == (137, "")


def test_a_container_is_told_from_the_machine(tmp_path: Path) -> None:
    """By the numbers that Linux gives its first namespaces, which differ from all others."""
    place = tmp_path / "self" / "ns"
    place.mkdir(parents=True)
    assert not in_first_namespace("ipc", tmp_path)
    (place / "ipc").touch()
    assert not in_first_namespace("ipc", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ipc", "pid"])
def test_a_namespace_of_its_own_is_seen_in_it(kind: str) -> None:
    """Also with a /proc of its own, as containers have, whose NSpid shows nothing of others."""
    need(PROCESS_NAMESPACES)
    code = "from paceline.launch.process_tree import in_first_namespace as first; "
    code += "print(first('ipc'), first('pid'))"
    words = ["unshare", f"--{kind}", "--fork", "--mount-proc", sys.executable, "-c", code]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert said[("ipc", "pid").index(kind)] == "False"
    other = "pid" if kind == "ipc" else "ipc"
    here = in_first_namespace("pid") if other == "pid" else in_first_namespace("ipc")
    assert said[("ipc", "pid").index(other)] == str(here)
