"""The emulated networks against the real ones, and against what DistributedDataParallel does."""

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.emulated import (
    FORWARD,
    Emulated,
    Layer,
    Pacer,
    Shape,
    arrivals,
    resnet50,
    scale_buckets,
    thinned_buckets,
    vgg19,
)
from paceline.distributed.group import Group
from paceline.gradient_sync import cost_model
from paceline.results.profile import Arrival
from tests.support.ranks import run_ranks

REAL: dict[str, tuple[Shape, Callable[[], nn.Module]]] = {
    "vgg19": (vgg19(1), lambda: torchvision.models.vgg19(num_classes=20)),
    "resnet50": (resnet50(1), lambda: torchvision.models.resnet50()),
}
PAIR = Shape(
    name="pair",
    layers=(Layer(shapes=((2, 3), (2,)), work=3.0), Layer(shapes=((4,),), work=1.0)),
    scale=1,
)


@pytest.fixture(autouse=True)
def inductor_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's first dispatch mode sets this variable; here it is put back."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")


@pytest.mark.parametrize("name", REAL)
def test_parameters_and_work_are_the_real_networks(name: str) -> None:
    shape, build = REAL[name]
    with torch.device("meta"):
        real = build()
        with FlopCounterMode(display=False) as counter:
            real(torch.empty(1, 3, 224, 224))
    expected = [tuple(p.shape) for p in real.parameters()]
    assert [one for layer in shape.layers for one in layer.shapes] == expected
    multiplied = sum(layer.work for layer in shape.layers if len(layer.shapes[0]) > 1)
    assert multiplied == counter.get_total_flops() / 2


@pytest.mark.parametrize(("thin", "full"), [(vgg19(), vgg19(1)), (resnet50(), resnet50(1))])
def test_thinned_networks_keep_their_proportions(thin: Shape, full: Shape) -> None:
    assert thin.shares() == pytest.approx(full.shares())
    assert thin.bytes == pytest.approx(full.bytes / thin.scale, rel=0.02)
    assert thin.bucket_bytes == pytest.approx(25 * 2**20 / thin.scale, abs=1)


class Clock:
    """A clock whose every wait lasts longer than asked for."""

    def __init__(self, late_s: float) -> None:
        self.now_s = 5.0
        self.slept: list[float] = []
        self._late_s = late_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds + self._late_s


def test_a_wait_that_was_too_long_shortens_the_next() -> None:
    clock = Clock(late_s=0.25)
    pacer = Pacer(clock.now, clock.sleep)
    pacer.begin()
    for _ in range(4):
        pacer.spend(1.0)
    assert clock.slept == [1.0, 0.75, 0.75, 0.75]
    assert clock.now_s == 9.25


def test_what_is_late_already_isnt_waited_for() -> None:
    clock = Clock(late_s=2.5)
    pacer = Pacer(clock.now, clock.sleep)
    pacer.begin()
    for _ in range(3):
        pacer.spend(1.0)
    assert clock.slept == [1.0]


def test_gradients_come_layer_by_layer_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    network, seen = Emulated(PAIR, 0.0, seed=3), []
    monkeypatch.setattr(network, "compute", lambda at, backward: seen.append((at, backward)))
    for place, layer in enumerate(network.layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, at=place: seen.append(at))
    loss = network(torch.ones(2, 1))
    assert seen == [(0, False), (1, False)]
    loss.backward()
    assert seen[2:] == [(1, True), 1, (0, True), 0, 0]
    assert [p.grad is not None for p in network.parameters()] == [True] * 3
    found = [p.grad for p in network.parameters() if p.grad is not None]
    torch.testing.assert_close(found, [one for layer in network.gradients for one in layer])


def test_arrivals_end_with_the_backward_pass() -> None:
    (first_s, first), (last_s, last) = arrivals(PAIR, 1.2)
    assert (first, last) == (16, 32)
    assert first_s == pytest.approx((1 - FORWARD) * 1.2 / 4)
    assert last_s == pytest.approx((1 - FORWARD) * 1.2)


def bucket_sizes(group: Group, build: Callable[[], Shape]) -> list[int]:
    shape = build()
    scale_buckets(shape)
    scale_buckets(shape)  # for another training of the same process
    network = DistributedDataParallel(Emulated(shape, 0.0, seed=group.rank))
    for _ in range(3):  # it puts them into order after the first
        network(torch.ones(1)).backward()
    told = network._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [int(size) for size in told.split(", ")]


@pytest.mark.ranks
@pytest.mark.parametrize("build", [vgg19, resnet50])
def test_the_model_knows_the_buckets(build: Callable[[], Shape]) -> None:
    found = run_ranks(2, bucket_sizes, build)[0]
    shape = build()
    ready = [Arrival(at_s=at, bytes=b) for at, b in arrivals(shape, 1.0)]
    expected = cost_model.buckets(ready, shape.bucket_bytes)
    with thinned_buckets(shape):
        assert cost_model.buckets(ready) == expected
    assert sum(found) == sum(bucket.bytes for bucket in expected) == shape.bytes
    assert len(found) == len(expected) > 3
    for size, bucket in zip(found, expected, strict=True):
        assert size == pytest.approx(bucket.bytes, rel=0.02)
    assert cost_model.MAX_BYTES == 25 << 20
