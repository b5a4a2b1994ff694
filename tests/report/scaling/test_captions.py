"""The sentences above the pictures say what is true of this study."""

from pathlib import Path
from typing import cast

import pytest

from paceline.report.scaling.bars import fixed_picture
from paceline.report.scaling.captions import (
    describe_efficiency,
    describe_fixed,
    describe_learning,
    describe_steps,
    describe_throughput,
)
from paceline.report.scaling.convergence import trained_sizes
from paceline.report.scaling.page import render_page
from paceline.report.scaling.series import size_name
from paceline.report.scaling.status import describe_state, find_gaps
from paceline.report.scaling.tables import key_figures, study_table
from paceline.results.study import Study, read_study
from tests.report.scaling.studies import (
    BASELINE,
    Record,
    size_record,
    spread,
    study_record,
    write_study,
)


def size_of(record: Record, place: int) -> Record:
    return cast("list[Record]", record["sizes"])[place]


@pytest.fixture
def four() -> Record:
    """The study of VGG-19: 8 workers reach 0.46."""
    record = study_record()
    last = size_of(record, -1)
    last["efficiency"] = spread(0.46)
    last["images_per_s"] = spread(8 * 0.46 * BASELINE)
    last["step_s"] = spread(1.734)
    last["parts"] = {**cast("Record", last["parts"]), "exposed": 0.9}
    return record


def read(tmp_path: Path, record: Record) -> Study:
    return read_study(write_study(tmp_path, record))[0]


def test_several_sizes(tmp_path: Path, four: Record) -> None:
    study = read(tmp_path, four)
    assert describe_throughput(study) == (
        "8 workers do 3.7 times the work of one: 146 images a second instead of 39.5. "
        "Ideal would be 8 times."
    )
    assert describe_efficiency(study) == (
        "With 8 workers the efficiency is 46 %: each does that share of what one does alone. Most "
        "of what is lost is communication that isn't hidden behind computation (0.90 s of 1.73 s a "
        "step)."
    )
    assert describe_steps(study) == (
        "With 8 workers a step takes 1.73 s; one worker's takes 0.81 s. Of it 0.90 s (52 %) are "
        "communication that isn't hidden behind computation."
    )
    assert describe_fixed(study) == (
        "Besides its steps, an epoch with 8 workers takes 4.58 s (3.2 % of the epoch) for "
        "evaluation, snapshot and loader start. No way of combining gradients changes that."
    )


def test_no_conclusion_is_drawn_of_what_is_not_reliable(tmp_path: Path, four: Record) -> None:
    told = "Not reliable: repeats differ by more than 20 % with 8 workers."
    study = read(tmp_path, {**four, "not_reliable": told})
    assert describe_throughput(study) == told
    assert describe_efficiency(study) == "Not reliable: no conclusion is drawn."
    state = describe_state(study)
    assert state.state == "interrupted"  # the colour of a warning
    assert state.sentence.startswith("not reliable; measured 1, 2, 4 and 8 workers")
    assert [figure.label for figure in key_figures(study)] == ["One worker"]
    page = render_page(study, tmp_path)
    assert page.count(told.replace(" %", "\u00a0%")) == 1
    assert "3.7 times" not in page


def test_one_worker_with_two_methods_is_told_apart(tmp_path: Path) -> None:
    record = study_record((1, 2))
    cast("list[Record]", record["sizes"]).append({**size_record(1), "method": "ordered"})
    study = read(tmp_path, record)
    names = [size_name(study, size) for size in study.sizes]
    assert names == ["1 worker, allreduce", "1 worker, ordered", "2 workers"]
    table = study_table(study)
    place = table.header.index("method")
    assert [row[place] for row in table.rows] == ["allreduce", "ordered", "allreduce"]


def test_one_size(tmp_path: Path) -> None:
    study = read(tmp_path, study_record((1,)))
    assert "One worker does 39.5 images a second." in describe_throughput(study)
    assert describe_efficiency(study) == "One worker alone is the measure: 100 %."
    assert describe_steps(study) == (
        "With 1 worker a step takes 0.81 s. The longest part of it is backward (0.53 s)."
    )


def test_several_methods_name_themselves(tmp_path: Path) -> None:
    study = read(tmp_path, study_record(methods=("allreduce", "powersgd"), predict=True))
    assert describe_throughput(study) == (
        "8 workers do 7.0 times the work of one with powersgd and 3.9 times with allreduce; one "
        "does 39.5 images a second."
    )
    told = describe_efficiency(study)
    assert "is 87 % with powersgd and 49 % with allreduce. With allreduce, most of what" in told
    assert "Predicted for 64 workers: 75 % with powersgd (64 to 82 %)." in told


def test_the_cause_is_what_grew_most(tmp_path: Path) -> None:
    record = study_record((1, 2))
    parts = cast("Record", size_of(record, 1)["parts"])
    size_of(record, 1)["parts"] = {**parts, "exposed": 0.01, "waiting": 0.2}
    assert "Most of what is lost is waiting for the slowest worker (0.20 s" in describe_efficiency(
        read(tmp_path, record)
    )


def test_with_a_fixed_global_batch_each_part_should_shrink(tmp_path: Path) -> None:
    """Where a worker of two takes as long as the one alone did, computing is what is lost."""
    record = study_record((1, 2)) | {"mode": "strong"}
    parts = cast("Record", size_of(record, 1)["parts"])
    size_of(record, 1)["parts"] = {**parts, "exposed": 0.01, "waiting": 0.0}
    told = describe_efficiency(read(tmp_path, record))
    assert "Most of what is lost is a slower backward pass (0.26 s" in told


def test_little_is_lost(tmp_path: Path) -> None:
    record = study_record((1, 2))
    size_of(record, 1)["efficiency"] = spread(0.98)
    assert describe_efficiency(read(tmp_path, record)).endswith("Hardly anything is lost.")


def test_without_one_worker_nothing_is_compared(tmp_path: Path) -> None:
    record = study_record((2, 4)) | {"baseline_images_per_s": None}
    for place in (0, 1):
        size_of(record, place)["efficiency"] = None
    study = read(tmp_path, record)
    assert "What one worker does alone isn't known" in describe_throughput(study)
    assert "wasn't measured" in describe_efficiency(study)


def test_trainings_are_compared_at_the_loss_that_all_reached(tmp_path: Path) -> None:
    record = study_record((1, 2), train=True)
    for place, (pace, losses) in enumerate([(100, [0.9, 0.5, 0.4]), (60, [0.95, 0.7, 0.45, 0.3])]):
        curve = [
            {"time_s": pace * n, "samples": 1000 * n, "val_loss": loss}
            for n, loss in enumerate(losses, 1)
        ]
        cast("Record", size_of(record, place)["trained"])["curve"] = curve
    study = read(tmp_path, record)
    sizes = trained_sizes(study)
    assert describe_learning(study, sizes, "time") == (
        "All got down to a validation loss of 0.4000: 1 worker after 5 min and 2 workers "
        "after 4 min."
    )
    assert describe_learning(study, sizes, "samples") == (
        "For a validation loss of 0.4000, 2 workers needed 1.3 times the samples that 1 worker "
        "needed."
    )


def test_what_could_not_be_measured_is_told(tmp_path: Path) -> None:
    record = study_record(methods=("allreduce", "powersgd"), train=True)
    size_of(record, 1).update(images_per_s=None, problem="RuntimeError: no route to node-2")
    size_of(record, 2).update(parts=None, fixed={}, trained=None)
    repeats = cast("list[Record]", size_of(record, 4)["repeats"])
    repeats[1]["problem"] = "it took too long"
    cast("list[Record]", size_of(record, 6)["repeats"]).pop()
    study = read(tmp_path, record)
    assert find_gaps(study) == (
        "2 workers, allreduce: RuntimeError: no route to node-2",
        "2 workers, powersgd: 1 of 3 repeats: it took too long",
        "8 workers, powersgd: 2 of 3 repeats done.",
        "Where the time of a step goes isn't known for 4 workers, allreduce.",
        "The fixed cost of an epoch wasn't measured for 4 workers, allreduce.",
        "No training was made with 4 workers, allreduce.",
    )
    assert describe_state(study).sentence.startswith("6 of 7 sizes measured: 1, 2, 4 and 8 workers")


def test_states(tmp_path: Path) -> None:
    record = study_record((1,))
    assert describe_state(read(tmp_path, record)).state == "finished"
    size_of(record, 0)["images_per_s"] = None
    assert describe_state(read(tmp_path, record)).state == "failed"
    assert describe_state(read(tmp_path, record | {"sizes": []})).state == "running"


def test_fixed_costs_that_no_size_has_are_no_picture(tmp_path: Path) -> None:
    record = study_record((1, 2))
    for place in (0, 1):
        size_of(record, place)["fixed"] = {}
    study = read(tmp_path, record)
    assert fixed_picture(study) is None
    assert "isn't known" in describe_fixed(study)
