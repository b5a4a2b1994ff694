"""The EC2 study of the documentation: VGG-19 with 20 classes, on T4 GPUs, one a node."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.gradient_sync.network_model import Cluster, Network
from paceline.results.profile import (
    Arrival,
    EpochCosts,
    Spread,
    StepParts,
    StepProfile,
    WorkerTime,
)
from paceline.scaling.prediction import Assumptions, library_of

_CONVOLUTIONS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Channels and how many in a row, at 224, 112, 56, 28 and 14 pixels."""

STEPS = {1: 650, 2: 325, 4: 163, 8: 82}
"""Of an epoch, by nodes. The study prints 375 for two nodes, which doesn't agree with its own
efficiency of 0.81, while half of 650 does."""
EPOCHS_S = {1: 8.76 * 60, 2: 5.40 * 60, 4: 3.35 * 60, 8: 2.37 * 60}
STEP_S = EPOCHS_S[1] / STEPS[1]


@dataclass(frozen=True)
class Layer:
    parameters: int
    products: int


def layers(head: Sequence[int] = (4096, 4096, 20)) -> list[Layer]:
    found, channels, pixels = [], 3, 224
    for width, number in _CONVOLUTIONS:
        for _ in range(number):
            weights = channels * width * 9
            found.append(Layer(weights + width, weights * pixels * pixels))
            channels = width
        pixels //= 2
    features = channels * pixels * pixels
    for width in head:
        found.append(Layer(features * width + width, features * width))
        features = width
    return found


def arrivals(backward_s: float, of: Sequence[Layer], scale: float = 1.0) -> tuple[Arrival, ...]:
    """When each layer's gradients are ready where the time goes as the arithmetic does."""
    total = sum(layer.products for layer in of)
    done, found = 0, []
    for layer in reversed(of):
        done += layer.products
        size = round(4 * layer.parameters * scale)
        found.append(Arrival(at_s=backward_s * done / total, bytes=size))
    return tuple(found)


def profile_of(
    step_s: float = STEP_S, head: Sequence[int] = (4096, 4096, 20), scale: float = 1.0
) -> StepProfile:
    """One worker: a third of the time goes forward, two thirds backward."""
    gradients = arrivals(step_s * 2 / 3, layers(head), scale)
    size = sum(arrival.bytes for arrival in gradients)
    return StepProfile(
        world_size=1,
        nodes=1,
        sync="allreduce",
        device="cuda",
        global_batch=32,
        steps_per_epoch=STEPS[1],
        steps_seen=0,
        step_s=Spread(median=step_s, low=step_s, high=step_s),
        images_per_s=32 / step_s,
        parts=StepParts(
            data=0.0,
            forward=step_s / 3,
            backward=step_s * 2 / 3,
            exposed=0.0,
            waiting=0.0,
            optimizer=0.0,
            other=0.0,
        ),
        workers=(WorkerTime(rank=0, host="g4dn.2xlarge", compute_s=step_s, spread_s=0.0),),
        gradients=gradients,
        gradient_bytes=size,
        parameter_bytes=size,
        wire_bytes_per_step=0.0,
        epoch=EpochCosts(),
    )


def cluster_of(
    profile: StepProfile,
    nodes: int,
    network: Network,
    *,
    per_node: int = 1,
    within: Network | None = None,
    assumed: Assumptions | None = None,
) -> Cluster:
    return Cluster(
        nodes=nodes,
        per_node=per_node,
        network=network,
        within=within,
        library=library_of(profile, assumed or Assumptions()),
        shares_memory=profile.device == "cpu",
    )
