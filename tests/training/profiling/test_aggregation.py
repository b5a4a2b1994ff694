from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

import pytest

from paceline.results.profile import Spread
from paceline.training.profiling.aggregation import WorkerTimes, parts_of, spread_of
from paceline.training.profiling.step_profiler import Lap


def told(
    waits_s: Mapping[str, float],
    agreements_s: Sequence[float] = (),
    **more: float,
) -> WorkerTimes:
    usual = {"data_s": 1.0, "forward_s": 2.0, "backward_s": 4.0, "optimizer_s": 1.0}
    return WorkerTimes(
        host="here",
        steps=len(waits_s),
        waits_s=waits_s,
        agreements_s={str(step): wait_s for step, wait_s in enumerate(agreements_s)},
        agreement_steps=10,
        **{**usual, **more},
    )


def test_who_waits_least_waits_for_the_network_and_the_others_for_it() -> None:
    fast = told({"1": 3.0, "2": 3.0, "3": 3.0}, other_s=0.5)
    slow = told({"1": 0.5, "2": 0.5, "3": 0.5}, forward_s=4.5, other_s=0.5)
    parts = parts_of([fast, slow], 11.5)
    assert parts.exposed == pytest.approx(0.5)
    assert parts.waiting == pytest.approx((3.0 + 0.5) / 2 - 0.5)
    assert parts.forward == pytest.approx((2.0 + 4.5) / 2)
    assert parts.other == pytest.approx(0.5)
    assert sum(astuple(parts)) == pytest.approx(11.5)


def test_the_slowest_may_be_another_one_in_each_step() -> None:
    one, other = told({"1": 5.0, "2": 1.0}), told({"1": 1.0, "2": 5.0})
    parts = parts_of([one, other], 8.0 + 3.0)
    assert (parts.exposed, parts.waiting) == pytest.approx((1.0, 2.0))


def test_only_steps_that_all_have_looked_at_are_compared() -> None:
    one, other = told({"1": 5.0, "2": 1.0}), told({"2": 1.0, "4": 9.0})
    parts = parts_of([one, other], 8.0 + 1.0)
    assert (parts.exposed, parts.waiting) == pytest.approx((1.0, 0.0))


def test_the_slowest_may_be_another_one_at_each_exchange() -> None:
    one, other = told({}, [10.0, 0.0]), told({}, [0.0, 10.0])
    parts = parts_of([one, other], 8.0 + 1.0)
    assert (parts.exposed, parts.waiting, parts.other) == pytest.approx((0.0, 1.0, 0.0))


def test_an_exchange_that_took_long_once_says_nothing_of_the_others() -> None:
    parts = parts_of([told({}, [0.1, 0.1, 60.0])], 8.0 + 3 * 0.1 / 10)
    assert parts.other == pytest.approx(3 * 0.1 / 10)


@pytest.mark.parametrize("step_s", [5.0, 50.0])
def test_parts_of_other_steps_than_most_are_still_the_step(step_s: float) -> None:
    parts = parts_of([told({"1": 2.0})], step_s)
    assert sum(astuple(parts)) == pytest.approx(step_s)
    assert parts.other == 0.0
    assert parts.backward / parts.forward == pytest.approx(2.0)


def test_waits_for_batches_are_those_of_all_steps() -> None:
    # Two reader processes have theirs ready at once: of the steps that were sampled none waited.
    burst = told({"1": 0.0}, data_s=0.0, lap_data_s=3.0)
    parts = parts_of([burst], 10.0 + 1.0)
    assert (parts.data, parts.forward, parts.backward) == pytest.approx((3.0, 16 / 7, 32 / 7))
    assert sum(astuple(parts)) == pytest.approx(11.0)
    assert parts_of([burst], 2.0).data == 2.0
    # One worker has no such laps: its samples count.
    both = parts_of([burst, told({"1": 0.0})], 7.5)
    assert both.data == pytest.approx(0.5)


def test_a_lap_counts_as_often_as_it_has_steps() -> None:
    def lap(steps: int, step_s: float) -> Lap:
        return Lap(steps=steps, seconds=steps * step_s, agreeing_s=0.0)

    laps = [lap(1, 9.0), lap(18, 1.0), lap(1, 0.5)]
    assert spread_of(laps) == Spread(median=1.0, low=1.0, high=1.0)
    assert spread_of([*laps, lap(5, 7.0)]) == Spread(median=1.0, low=1.0, high=7.0)
    assert spread_of(laps[:1]) == Spread(median=9.0, low=9.0, high=9.0)
    assert spread_of([]) is None


def test_what_is_told_arrives() -> None:
    sent = replace(told({"1": 0.25}), compute_s=3.0)
    assert WorkerTimes.from_json(sent.to_json()) == sent
