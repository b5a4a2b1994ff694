"""Networks that wait instead of computing: real gradients in real order, and no processor needed.

The layers have the parameter tensors of VGG-19 or ResNet-50, thinned alike everywhere. Forward and
backward wait for each layer's share of the step, by its multiplications at full width: many hosts
then share two cores without slowing each other down, and what is exchanged is exchanged for real.
"""

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol, cast, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Shapes = tuple[tuple[int, ...], ...]

FORWARD = 1 / 3
"""Share of a step's computation: the backward pass multiplies twice as much."""
BUCKET_MIB = 25.0
"""What DistributedDataParallel collects before it sends; scaled with the network."""
_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer's parameters as they are here, and its work at full width."""

    shapes: Shapes
    work: float
    """Multiplications of one image."""

    @property
    def bytes(self) -> int:
        """Of its gradients."""
        return 4 * sum(map(prod, self.shapes))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A network."""

    name: str
    layers: tuple[Layer, ...]
    """In forward order."""
    scale: int
    """How many times fewer parameters it has than the real one."""

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def bucket_bytes(self) -> int:
        """Bytes at which a bucket of gradients is full."""
        return int(BUCKET_MIB / self.scale * 2**20)

    def shares(self) -> list[float]:
        """Give each layer's share of the work."""
        total = sum(layer.work for layer in self.layers)
        return [layer.work / total for layer in self.layers]


def vgg19(thinner: int = 8, classes: int = 20) -> Shape:
    """VGG-19 on 224x224 (Simonyan and Zisserman, 2014, table 1, column E), channels divided."""
    layers, side, before = [], 224, 3
    for block, width in enumerate((64, 128, 256, 512, 512)):
        for _ in range(2 if block < 2 else 4):
            layers.append(_convolution(before, width, 3, side, thinner, bias=True))
            before = width
        side //= 2
    for inputs, outputs in pairwise((512 * side * side, 4096, 4096, classes)):
        thin = outputs if outputs == classes else outputs // thinner
        shapes = ((thin, inputs // thinner), (thin,))
        layers.append(Layer(shapes=shapes, work=inputs * outputs))
    return Shape(name="VGG-19", layers=tuple(layers), scale=thinner**2)


def resnet50(thinner: int = 4, classes: int = 1000) -> Shape:
    """ResNet-50 on 224x224 (He et al., 2015, table 1), channels divided: 161 tensors."""
    layers = list(_normed(3, 64, 7, 112, thinner))
    before, side = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            inner = side  # of the first convolution, which comes before the stride
            side = side // 2 if stage and not block else side
            layers += _normed(before, width, 1, inner, thinner)
            layers += _normed(width, width, 3, side, thinner)
            layers += _normed(width, 4 * width, 1, side, thinner)
            if not block:
                layers += _normed(before, 4 * width, 1, side, thinner)
            before = 4 * width
    thin = classes // thinner
    shapes = ((thin, before // thinner), (thin,))
    layers.append(Layer(shapes=shapes, work=before * classes))
    return Shape(name="ResNet-50", layers=tuple(layers), scale=thinner**2)


NETWORKS: dict[str, Callable[[], Shape]] = {"vgg19": vgg19, "resnet50": resnet50}


def _convolution(
    inputs: int, outputs: int, kernel: int, side: int, thinner: int, *, bias: bool
) -> Layer:
    thin_in = inputs if inputs == 3 else inputs // thinner
    weight = (outputs // thinner, thin_in, kernel, kernel)
    work = inputs * outputs * kernel * kernel * side * side
    return Layer(shapes=(weight, (outputs // thinner,)) if bias else (weight,), work=work)


def _normed(inputs: int, outputs: int, kernel: int, side: int, thinner: int) -> Iterator[Layer]:
    """A convolution, and the BatchNorm behind it."""
    yield _convolution(inputs, outputs, kernel, side, thinner, bias=False)
    yield Layer(shapes=((outputs // thinner,),) * 2, work=2 * outputs * side * side)


class _Context(Protocol):
    """What autograd keeps between the two directions."""

    network: "Emulated"
    place: int


@final
class _Layer(torch.autograd.Function):
    """Passes a number on, late; its gradients come late as well."""

    @staticmethod
    def forward(
        ctx: _Context, signal: Tensor, network: "Emulated", place: int, *parameters: Tensor
    ) -> Tensor:
        ctx.network, ctx.place = network, place
        network.compute(place, backward=False)
        return signal.clone()

    @staticmethod
    def backward(ctx: _Context, signal: Tensor) -> tuple[Tensor | None, ...]:
        ctx.network.compute(ctx.place, backward=True)
        return (signal, None, None, *ctx.network.gradients[ctx.place])


@final
class Emulated(nn.Module):
    """A network that waits for each layer's share of a step instead of computing it."""

    def __init__(self, shape: Shape, compute_s: float, seed: int) -> None:
        """Args:
        shape: The layers.
        compute_s: Seconds of forward and backward together.
        seed: Of the gradients, which are always the same ones: another on each worker.
        """
        super().__init__()
        shares = shape.shares()
        self._forward_s = [FORWARD * compute_s * share for share in shares]
        self._backward_s = [(1 - FORWARD) * compute_s * share for share in shares]
        self._last = len(shares) - 1
        self._pacer = Pacer()
        draw = torch.Generator().manual_seed(seed)
        self.gradients = [
            tuple(torch.randn(one, generator=draw) for one in layer.shapes)
            for layer in shape.layers
        ]
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.zeros(one) for one in layer.shapes) for layer in shape.layers
        )

    def compute(self, place: int, *, backward: bool) -> None:
        """Take the time of a layer."""
        if place == (self._last if backward else 0):
            self._pacer.begin()
        self._pacer.spend((self._backward_s if backward else self._forward_s)[place])

    def forward(self, images: Tensor) -> Tensor:
        """Give a loss."""
        signal = images.float().mean()
        for place, layer in enumerate(self.layers):
            parameters = cast(nn.ParameterList, layer)
            signal = cast(Tensor, _Layer.apply(signal, self, place, *parameters))
        return signal


@final
class Pacer:
    """Spends time exactly: a wait that was too long shortens the next one."""

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self._due_s = 0.0

    def begin(self) -> None:
        """Count from now on."""
        self._due_s = self._now()

    def spend(self, seconds: float) -> None:
        """Wait until so much more time has been spent since the beginning."""
        self._due_s += seconds
        left_s = self._due_s - self._now()
        if left_s > 0:
            self._sleep(left_s)


def wake_exactly() -> None:
    """Have the kernel end this thread's waits when they are due, not up to 50 us later (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


def scale_buckets(shape: Shape) -> None:
    """Thin DistributedDataParallel's buckets like the network, in this process, from now on.

    As they are, the whole of a thinned network would be in two of them, and nothing would be sent
    before the end of the backward pass.
    """
    made: Callable[..., None] = DistributedDataParallel.__init__
    usual: Callable[..., None] = getattr(made, "__wrapped__", made)

    @functools.wraps(usual)
    def thinned(self: DistributedDataParallel, *args: object, **options: object) -> None:
        if options.get("bucket_cap_mb") is None:
            options["bucket_cap_mb"] = shape.bucket_bytes / 2**20
        usual(self, *args, **options)

    setattr(DistributedDataParallel, "__init__", thinned)  # noqa: B010  # mypy refuses a method
