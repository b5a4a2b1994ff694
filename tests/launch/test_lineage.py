import os
import subprocess
import sys

from tests.launch.waiting import alive, until

_CODE = """
import os, subprocess, sys
from paceline.launch.lineage import die_with_parent
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
