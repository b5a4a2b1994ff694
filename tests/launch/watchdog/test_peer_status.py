from dataclasses import replace
from pathlib import Path

from paceline.launch.watchdog.peer_status import PeerStatus
from tests.launch.watchdog.states import IN_STEP

_THERE = replace(IN_STEP, rank=2, host="node1")


def test_nodes_hear_of_each_other_while_they_go_on(tmp_path: Path) -> None:
    here, there = PeerStatus(tmp_path, 0, 1), PeerStatus(tmp_path, 2, 1)
    here.publish([IN_STEP], None)
    there.publish([_THERE], None)
    assert here.read()[0] == []  # what lies there may be of an earlier training
    there.publish([_THERE], None)
    assert here.read() == ([_THERE], {}, False)
    there.publish([_THERE], {2: "its stack"})
    assert here.read() == ([_THERE], {2: "its stack"}, True)
    for _ in range(6):
        found = here.read()
    assert found[0] == []  # it has ended, or can't write any more


def test_other_attempts_and_broken_files_dont_count(tmp_path: Path) -> None:
    here, old = PeerStatus(tmp_path, 0, 1), PeerStatus(tmp_path, 2, 0)
    for number in range(2):
        old.publish([_THERE], None)
        (tmp_path / ".watch-node-5.json").write_text(f'{{"sequence": {number}}}')
        (tmp_path / ".watch-node-6.json").write_text("[" * number)
        assert here.read() == ([], {}, True)


def test_leaving_removes_the_file(tmp_path: Path) -> None:
    here = PeerStatus(tmp_path, 0, 0)
    here.publish([IN_STEP], None)
    here.leave()
    here.leave()
    assert list(tmp_path.iterdir()) == []
