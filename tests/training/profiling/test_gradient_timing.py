import pytest
import torch
from torch import Tensor, nn

from paceline.results.profile import Arrival
from paceline.training.profiling import gradient_timing
from paceline.training.profiling.gradient_timing import GradientTimes, merged
from paceline.training.profiling.step_timeline import Moment, now


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3))


def _pass(times: GradientTimes, loss: Tensor) -> None:
    times.begin(now(on_gpu=False))
    loss.backward()
    times.end(now(on_gpu=False))


def test_gradients_come_from_the_last_layer_to_the_first() -> None:
    model, times = _net(), GradientTimes(on_gpu=False)
    for _ in range(3):
        times.watch(model.parameters())
        _pass(times, model(torch.ones(2, 4)).sum())
        times.take(is_first=False)
    found = times.arrivals(1.0)
    assert [a.at_s for a in found] == sorted(a.at_s for a in found)
    assert found[0].at_s > 0
    assert found[-1].at_s <= 1.0
    assert times.arrivals(3.0)[-1].at_s == 3 * found[-1].at_s
    layers = [sum(a.bytes for a in found[i : i + 2]) for i in (0, 2, 4)]
    assert layers == [4 * (5 * 3 + 3), 4 * (6 * 5 + 5), 4 * (4 * 6 + 6)]


def test_passes_without_an_exchange_are_not_meant() -> None:
    model, times = _net(), GradientTimes(on_gpu=False)
    times.watch(model.parameters())
    model(torch.ones(2, 4)).sum().backward()  # a piece of a batch
    assert times.arrivals(1.0) == ()
    _pass(times, model[2](torch.ones(2, 5)).sum())
    model(torch.ones(2, 4)).sum().backward()  # the gradients once more, through the exchange
    times.take(is_first=False)
    assert sum(a.bytes for a in times.arrivals(1.0)) == 4 * (5 * 3 + 3)


def test_two_passes_follow_each_other() -> None:
    one, other, times = _net(), nn.Linear(4, 2), GradientTimes(on_gpu=False)
    times.watch([*one.parameters(), *other.parameters()])
    _pass(times, one(torch.ones(2, 4)).sum())
    _pass(times, other(torch.ones(2, 4)).sum())
    times.take(is_first=False)
    last_two = times.arrivals(1.0)[-2:]
    assert sum(a.bytes for a in last_two) == 4 * (4 * 2 + 2)


def test_moments_of_a_gpu_are_not_waited_for_between_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, times, read = _net(), GradientTimes(on_gpu=False), list[tuple[Moment, Moment]]()

    def seconds_between(begin: Moment, end: Moment) -> float:
        read.append((begin, end))
        return 1.0

    monkeypatch.setattr(gradient_timing, "seconds_between", seconds_between)
    times.watch(model.parameters())
    _pass(times, model(torch.ones(2, 4)).sum())
    times.take(is_first=False)
    assert not read
    times.arrivals(1.0)
    assert len(read) == 7  # the pass, and when the gradients came
    times.arrivals(1.0)
    assert len(read) == 7


def test_the_first_step_counts_until_there_is_another() -> None:
    one, other, times = _net(), nn.Linear(4, 2), GradientTimes(on_gpu=False)
    times.watch(one.parameters())
    _pass(times, one(torch.ones(2, 4)).sum())
    times.take(is_first=True)
    assert len(times.arrivals(1.0)) == 6
    times.watch(other.parameters())
    _pass(times, other(torch.ones(2, 4)).sum())
    times.take(is_first=False)
    assert len(times.arrivals(1.0)) == 2


def test_nothing_stays_on_the_parameters() -> None:
    model, times = _net(), GradientTimes(on_gpu=False)
    times.watch(model.parameters())
    times.drop()
    _pass(times, model(torch.ones(2, 4)).sum())
    times.take(is_first=False)
    assert times.arrivals(1.0) == ()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_neighbours_are_merged_and_no_byte_is_lost() -> None:
    many = [Arrival(at_s=float(i), bytes=i) for i in range(10)]
    assert merged(many, 10) == tuple(many)
    found = merged(many, 4)
    assert [a.at_s for a in found] == [2.0, 5.0, 8.0, 9.0]
    assert [a.bytes for a in found] == [0 + 1 + 2, 3 + 4 + 5, 6 + 7 + 8, 9]
    assert merged([], 4) == ()
