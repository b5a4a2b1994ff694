"""What follows from measurements."""

import json
from dataclasses import asdict, replace

import pytest

from paceline.results.study import SizeResult
from paceline.scaling.result import summarise
from tests.scaling.studies import ASKED, TRAINED, ec2_like, failed, measured, size


def test_efficiency_is_against_the_best_run_of_one_worker() -> None:
    found = {
        size(1): [measured(1, 0.8), measured(1, 1.0, number=2)],
        size(2): [measured(2, 1.0), measured(2, 1.6, number=2)],
    }
    study = summarise(ASKED, list(found), found, {}, {})
    assert study.baseline_images_per_s == pytest.approx(40.0)
    alone, two = study.sizes
    assert alone.efficiency is not None
    assert alone.efficiency.high == pytest.approx(1.0)
    assert alone.efficiency.low == pytest.approx(0.8)
    assert two.images_per_s is not None
    assert (two.images_per_s.low, two.images_per_s.high) == (40.0, 64.0)
    assert two.efficiency is not None
    assert two.efficiency.median == pytest.approx((64 / 80 + 40 / 80) / 2)


def test_a_method_that_computes_slower_alone_does_not_look_better() -> None:
    slow = size(1, "ordered")
    found = {
        size(1): [measured(1, 0.8)],
        slow: [measured(1, 1.6, sync="ordered")],
        size(2, "ordered"): [measured(2, 1.6, sync="ordered")],
    }
    study = summarise(ASKED, list(found), found, {"ordered": {"shards": 8}}, {})
    assert [round(_efficiency(each), 3) for each in study.sizes] == [1.0, 0.5, 0.5]
    assert [each.method_options for each in study.sizes] == [{}, {"shards": 8}, {"shards": 8}]


def test_the_study_on_ec2_comes_out_as_it_was() -> None:
    study = ec2_like()
    assert [round(_efficiency(each), 2) for each in study.sizes] == [0.99, 0.8, 0.64, 0.46]
    eight = study.sizes[-1]
    assert (eight.global_batch, eight.steps_per_epoch) == (256, 82)
    assert eight.step_s is not None
    assert eight.epoch_s == pytest.approx(82 * eight.step_s.median + 4.5)
    assert study.sizes[0].trained == TRAINED


def test_parts_are_those_of_the_middle_repeat() -> None:
    found = {size(2): [measured(2, step_s) for step_s in (1.3, 0.9, 1.1)]}
    (two,) = summarise(ASKED, [size(2)], found, {}, {}).sizes
    assert two.parts is not None
    assert two.parts.exposed == pytest.approx(0.3)
    assert two.efficiency is None


def test_parts_are_the_median_step_also_of_two_repeats() -> None:
    found = {size(2): [measured(2, step_s) for step_s in (0.9, 1.1)]}
    (two,) = summarise(ASKED, [size(2)], found, {}, {}).sizes
    assert two.parts is not None
    assert two.step_s is not None
    assert sum(asdict(two.parts).values()) == pytest.approx(two.step_s.median) == 1.0


def test_what_failed_has_its_problem_and_the_rest_its_figures() -> None:
    found = {
        size(1): [measured(1, 0.8), failed(1, "a link broke", 70)],
        size(8): [failed(8, "out of memory")],
    }
    study = summarise(ASKED, [size(1), size(2), size(8)], found, {}, {})
    alone, two, eight = study.sizes
    assert (alone.problem, two.problem, eight.problem) == (None, None, "out of memory")
    assert eight.images_per_s is None
    assert [repeat.problem for repeat in alone.repeats] == [None, "a link broke"]
    assert "1 of 2 measurements of 1 worker with allreduce failed" in " ".join(study.notes)


def test_json_can_carry_it() -> None:
    told = json.loads(json.dumps(ec2_like().to_json(), allow_nan=False))
    assert (told["format"], told["kind"]) == (1, "scale")
    assert told["sizes"][1]["efficiency"].keys() == {"median", "low", "high"}
    assert told["sizes"][0]["trained"]["curve"][0]["samples"] == 20800


@pytest.mark.parametrize(
    ("threads", "cores", "note"),
    [
        ({1: 1, 2: 1}, 2, None),
        ({1: 2, 2: 1}, 2, "One worker computed with 2 threads, 2 workers with fewer"),
        ({1: 1, 2: 1}, 1, "2 workers shared too few CPU cores"),
    ],
)
def test_workers_that_share_cores_are_noted(
    threads: dict[int, int], cores: int, note: str | None
) -> None:
    found = {
        size(n, nodes=1): [measured(n, 0.8, threads=t, cores=cores)] for n, t in threads.items()
    }
    notes = summarise(ASKED, list(found), found, {}, {}).notes
    assert any(note in told for told in notes) if note else notes == ()


def test_doubtful_measurements_are_noted() -> None:
    one, two = measured(1, 0.8, steps_seen=3), measured(2, 0.8)
    found = {size(1): [one], size(2): [two, replace(two, images_per_s=40.0)]}
    study = summarise(ASKED, list(found), found, {}, {})
    notes = " ".join(study.notes)
    assert "Fewer than 5 steps could be looked at with 1 worker: give more than 20" in notes
    assert "Not reliable: repeats differ by more than 20 % with 2 workers." in study.not_reliable


def _efficiency(result: SizeResult) -> float:
    assert result.efficiency is not None
    return result.efficiency.median


def test_more_than_the_work_of_one_for_each_is_not_reliable() -> None:
    """As on a busy machine: one worker was held up, and each of two seemed to do 17 times that."""
    found = {size(1): [measured(1, 0.8)], size(2): [measured(2, 0.8 / 17.23)]}
    study = summarise(ASKED, list(found), found, {}, {})
    assert study.not_reliable.startswith(
        "Not reliable: each of 2 workers with allreduce seems to do 1723 % of what one does alone. "
    )
    found = {size(1): [measured(1, 0.8)], size(2): [measured(2, 0.8 / 1.09)]}
    assert summarise(ASKED, list(found), found, {}, {}).not_reliable == ""
    assert ec2_like().not_reliable == ""
