"""What stands at the top of the page, and its tables of classes."""

import json
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from paceline.report import sections
from paceline.report.load_run import read_run
from paceline.results.confusion import Confusion
from paceline.results.run_directory import RunDirectory

MakeRun = Callable[..., RunDirectory]


def change(run: RunDirectory, **parts: dict[str, object]) -> None:
    content = json.loads(run.run_json.read_text())
    run.run_json.write_text(
        json.dumps({**content, **{k: {**content[k], **v} for k, v in parts.items()}})
    )


def square(classes: int) -> Confusion:
    counts = tuple(
        tuple(5 if i == j else int(j == 0) for j in range(classes)) for i in range(classes)
    )
    return Confusion(classes=tuple(f"c{n}" for n in range(classes)), counts=counts)


def test_the_name_is_the_users_or_the_directorys(make_run: MakeRun) -> None:
    run = make_run()
    assert sections.run_name(read_run(run)) == "run"
    change(run, settings={"name": "wide net"})
    assert sections.run_name(read_run(run)) == "wide net"


def test_the_top_says_which_run_it_is(make_run: MakeRun) -> None:
    found = sections.facts_table(read_run(make_run()), running=False)
    assert [(fact.name, fact.value) for fact in found] == [
        ("Started", "2026-03-02 09:15:00 UTC"),
        ("Host", "node-1"),
        ("Command", "paceline train digits --lr 0.2 --workers 2"),
    ]


def test_where_the_loss_chooses_the_best_its_accuracy_is_not_called_so(make_run: MakeRun) -> None:
    run = make_run()
    assert "Best accuracy" in {figure.label for figure in sections.key_figures(read_run(run))}
    change(run, settings={"best_by": "val_loss"})
    found = {figure.label: figure.note for figure in sections.key_figures(read_run(run))}
    assert "Best accuracy" not in found
    assert found["Accuracy"].endswith(", with the best loss")


def test_many_hosts_are_counted() -> None:
    rows = sections.facts(started_at="", hosts=[f"h{n}" for n in range(9)], command=())
    assert [row.value for row in rows] == ["h0, h1, h2, h3 and 5 more"]


def test_eta_is_from_the_newest_epochs_end(make_run: MakeRun) -> None:
    run = make_run(done=5, epochs=20, because=None)
    spent_s = read_run(run).metrics.last("time_s") or 0.0
    ended = datetime.now(UTC) - timedelta(seconds=spent_s)  # an epoch's time has passed five times
    os.utime(run.metrics_csv, (ended.timestamp(), ended.timestamp()))
    report = read_run(run)
    assert sections.remaining_s(report) == pytest.approx(15 * spent_s / 5)
    (eta,) = [f.value for f in sections.facts_table(report, running=True) if f.name == "ETA"]
    ends = ended + timedelta(seconds=3 * spent_s)
    assert eta.startswith(f"{ends:%Y-%m-%d %H:%M:%S} UTC, in 13 s at most")


def test_a_time_budget_ends_it_earlier(make_run: MakeRun) -> None:
    run = make_run(done=5, epochs=20, because=None)
    change(run, settings={"time_budget": "8s"})
    report = read_run(run)
    assert sections.remaining_s(report) == pytest.approx(8 - (report.metrics.last("time_s") or 0))


@pytest.mark.parametrize("epochs", [None, "many", 0, 1e300])
def test_without_a_plan_there_is_no_eta(make_run: MakeRun, epochs: object) -> None:
    run = make_run(done=5, because=None)
    change(run, settings={"epochs": epochs})
    names = [fact.name for fact in sections.facts_table(read_run(run), running=True)]
    assert "ETA" not in names
    assert "Written" in names


def test_the_environment_is_what_is_known_of_it(make_run: MakeRun) -> None:
    run = make_run()
    known = {row.name: row.value for row in sections.environment_table(read_run(run))}
    assert known == {
        "git commit": "1a2b3c4d5e6f, with changes",
        "Python": "3.11.7",
        "torch": "2.15.0",
        "numpy": "2.4.0",
        "Paceline": "0.1.0",
        "CPU": "Example CPU at 2.4 GHz",
        "device": "cpu",
        "backend": "gloo",
        "threads": "1",
    }
    content = json.loads(run.run_json.read_text())
    gpu = {"gpu": "NVIDIA H200", "driver": "575.57", "cuda": "13.2", "cudnn": 91900}
    run.run_json.write_text(json.dumps({**content, "numerics": gpu}))
    known = {row.name: row.value for row in sections.environment_table(read_run(run))}
    assert (known["GPU"], known["CUDA"], known["cuDNN"]) == ("NVIDIA H200", "13.2", "91900")
    assert "device" not in known  # the GPU is it
    # A run that is cut: neither empty lines nor empty columns.
    bare = {"git": None, "hosts": [{"host": "a", "ranks": [0]}], "versions": {"torch": None}}
    run.run_json.write_text(json.dumps({**content, **bare, "derived": {}}))
    report = read_run(run)
    assert sections.environment_table(report) == ()
    assert sections.hosts_table(report).header == ("host", "ranks")


def test_what_followed_from_the_settings_is_listed_apart(make_run: MakeRun) -> None:
    found = {row.name: row.value for row in sections.resolved_table(read_run(make_run()))}
    assert found["batch per worker"] == "32, 32"
    assert found["lr"] == "0.2 (as given, not scaled)"
    assert not {"backend", "threads", "device", "lr rule"} & set(found)
    # Without --shards the number of parts is that of workers, and looks as if the mode were on.
    assert "shards" not in found


def test_cells_are_coloured_by_their_share_of_the_row() -> None:
    counts = ((81, 19), (0, 0))
    confusion = Confusion(classes=("cat", "dog"), counts=counts)
    (name, (right, wrong)), (_, empty) = sections.confusion_rows(confusion)
    assert (name, right.strength, right.right) == ("cat", "90%", True)
    assert wrong.tooltip == "19 of 100 samples of cat taken for dog (19 %)"
    assert {cell.strength for cell in empty} == {"0%"}


def test_many_classes_are_listed_worst_first() -> None:
    many = square(sections.MAX_CLASSES + 5)
    assert sections.confusion_rows(many) == ()
    table = sections.classes_table(many)
    assert table.rows[0][0] == "c0"  # the others are taken for it
    assert len(sections.mistakes_table(many).rows) == len(many.classes) - 1
    assert len(sections.confusion_rows(square(sections.MAX_CLASSES))) == sections.MAX_CLASSES
