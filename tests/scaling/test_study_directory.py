"""The directory of a study."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.scaling.study_directory import (
    OF_TRAINED,
    StudyDirectory,
    removal_command,
    remove_snapshots,
)
from tests.scaling.studies import ASKED, ec2_like, failed, keep_record, measured, size
from tests.support.nearssh import near_ssh


def test_a_new_directory_and_the_same_study_again(tmp_path: Path) -> None:
    place = StudyDirectory(tmp_path / "deep" / "study")
    assert place.prepare(ASKED.asked)
    place.write(ec2_like())
    assert not place.prepare(ASKED.asked)
    assert json.loads(place.study_json.read_text())["kind"] == "scale"
    assert place.study_csv.read_text().startswith("workers,nodes,method")
    later = place.begun(replace(ASKED, started_at="2026-02-02T00:00:00+00:00"))
    assert later.started_at == ASKED.started_at


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"--mode": "strong"}, "holds a study with --mode weak, and now there is --mode strong"),
        ({"--mode": "weak", "--lr": 0.1}, "with no --lr, and now there is --lr 0.1"),
    ],
)
def test_another_study_is_refused(now: dict[str, object], message: str, tmp_path: Path) -> None:
    place = StudyDirectory(tmp_path)
    place.write(ASKED)
    with pytest.raises(UsageError, match=message):
        place.prepare(now)


def test_whole_trainings_may_come_later_but_not_others(tmp_path: Path) -> None:
    place = StudyDirectory(tmp_path)
    trained = {**ASKED.asked, OF_TRAINED: {"--epochs": 3}}
    place.write(ASKED)
    place.prepare(trained)
    place.write(place.begun(replace(ASKED, asked=trained)))
    place.prepare({**ASKED.asked, OF_TRAINED: None})
    place.write(place.begun(replace(ASKED, asked={**ASKED.asked, OF_TRAINED: None})))
    with pytest.raises(UsageError, match="options of --train"):
        place.prepare({**ASKED.asked, OF_TRAINED: {"--epochs": 4}})


@pytest.mark.parametrize(("shared", "mode"), [(False, 0o700), (True, 0o755)])
def test_others_may_read_a_study_only_if_that_was_asked_for(
    shared: bool, mode: int, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        StudyDirectory(tmp_path / "study").prepare(ASKED.asked, shared=shared)
    finally:
        os.umask(before)
    assert (tmp_path / "study").stat().st_mode & 0o777 == mode


def test_what_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no study"):
        StudyDirectory(tmp_path).prepare({})
    for text in ("[]", "{}", '{"format": 1, "kind": "scale", "asked": 1}'):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(UsageError, match=r"can't be resumed: it |it should hold a JSON object"):
            StudyDirectory(tmp_path).prepare({})
    (tmp_path / "study.json").write_text('{"format": 9, "kind": "scale", "asked": {}}')
    with pytest.raises(UsageError, match="it has format 9, and this Paceline reads 1"):
        StudyDirectory(tmp_path).prepare({})
    with pytest.raises(UsageError, match="can't be used"):
        StudyDirectory(tmp_path / "mine.txt" / "study").prepare({})


def test_options_of_a_method_may_come_with_it_but_not_change(tmp_path: Path) -> None:
    place = StudyDirectory(tmp_path)
    place.write(ASKED)
    keep_record(tmp_path, measured(2, 1.0))
    low_rank = {**ASKED.asked, "--powersgd-rank": 2}
    place.prepare(low_rank, ["allreduce", "powersgd"])
    place.write(place.begun(replace(ASKED, asked=low_rank)))
    keep_record(tmp_path, measured(2, 1.0, sync="powersgd"))
    place.prepare(low_rank, ["powersgd"])
    place.prepare({**ASKED.asked, "--powersgd-rank": 2}, ["powersgd"])
    for other in (ASKED.asked, {**ASKED.asked, "--powersgd-rank": 8}):
        with pytest.raises(UsageError, match="holds a study with --powersgd-rank 2"):
            place.prepare(other, ["allreduce", "powersgd"])


@pytest.mark.parametrize("was_there", [True, False])
def test_what_nothing_came_of_is_removed_and_nothing_else(tmp_path: Path, was_there: bool) -> None:
    place = StudyDirectory(tmp_path / "study")
    for mine in (False, True):
        place.prepare(ASKED.asked)
        with place.lock():
            place.write(ASKED)
            keep_record(place.path, failed(1, "unknown option", 2))
            if mine:
                (place.path / "mine.txt").write_text("mine")
            place.discard(keep=was_there)
        assert place.path.exists() == (was_there or mine)
    assert [path.name for path in place.path.iterdir()] == ["mine.txt"]


def test_what_was_measured_is_never_removed(tmp_path: Path) -> None:
    place = StudyDirectory(tmp_path)
    place.write(ASKED)
    keep_record(tmp_path, measured(1, 0.8))
    place.discard(keep=False)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["measured", "study.csv", "study.json"]


def test_two_studies_do_not_share_a_directory(tmp_path: Path) -> None:
    place = StudyDirectory(tmp_path)
    with place.lock(), pytest.raises(UsageError, match="is running in"), place.lock():
        pass


def test_sizes_measured_before_are_told_too(tmp_path: Path) -> None:
    place = StudyDirectory(tmp_path)
    keep_record(tmp_path, measured(8, 1.0, sync="powersgd", number=4))
    (tmp_path / "measured" / "notes.json").write_text("{}")
    sizes = place.sizes_besides((size(1, nodes=1), size(16, nodes=1)), ())
    assert [each.name for each in sizes] == ["1-allreduce", "8-powersgd", "16-allreduce"]
    assert place.rounds(3) == 4
    assert place.rounds(5) == 5


HERE = Path("/work/my project")


@pytest.mark.parametrize(
    ("directory", "sync_code", "run_dir", "removed"),
    [
        (None, False, "/work/my project/runs/x", "'/work/my project/runs/x/snapshots'"),
        ("/data", False, "/work/my project/runs/x", "/data/runs/x/snapshots"),
        ("~/it's", False, "/work/my project/x", "\"$HOME\"'/it'\"'\"'s/x/snapshots'"),
        (None, True, "/work/my project/x", "\"$HOME\"'/paceline/my project/x/snapshots'"),
        ("/data", False, "/elsewhere/x", "/elsewhere/x/snapshots"),
    ],
)
def test_where_the_snapshots_are(
    directory: str | None, sync_code: bool, run_dir: str, removed: str
) -> None:
    host, options = Host(name="a", directory=directory), HostsOptions(sync_code=sync_code)
    command = removal_command(host, options, Path(run_dir), HERE)
    assert command[-3:] == ["--", "a", f"rm -rf -- {removed}"]


def test_they_are_gone_and_a_host_that_fails_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{near_ssh(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    run = tmp_path / "far" / "runs" / "x"
    (run / "snapshots" / "step-1").mkdir(parents=True)
    hosts = [Host(name="a", directory=str(tmp_path / "far")), Host(name="nowhere")]
    remove_snapshots(hosts, HostsOptions(), tmp_path / "here" / "runs" / "x", tmp_path / "here")
    assert list(run.iterdir()) == []
