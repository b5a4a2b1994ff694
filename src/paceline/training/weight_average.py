"""The exponential moving average of a training's weights, which evaluations take."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from paceline.errors import SnapshotError


@final
class WeightAverage:
    """Follows the parameters as `torch.optim.swa_utils.AveragedModel` does with this decay.

    Every worker has it, from the same weights by the same operations, so that nothing of it is
    exchanged. Buffers (BatchNorm's) aren't averaged: those of training are used with it.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Follow a model; the average begins with its weights after the first step.

        Args:
            model: Complete, on its device.
            decay: How much of the average stays at each step, above 0 and below 1.
        """
        self._live = dict(model.named_parameters())
        every = model.named_parameters(remove_duplicate=False)
        known = {id(parameter): name for name, parameter in self._live.items()}
        self._names = {name: known[id(parameter)] for name, parameter in every}
        self._average: dict[str, Tensor] = {}
        self._pairs: Sequence[tuple[list[Tensor], list[Tensor]]] = ()
        self._update = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Take a step's weights in. Local to the worker.

        Args:
            step: Optimizer steps done.
        """
        if not self._average:
            self._begin({name: p.detach().clone() for name, p in self._live.items()})
            return
        for averages, parameters in self._pairs:
            self._update(averages, parameters, step)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model has the averaged weights. Local to the worker."""
        own = {name: self._live[name].detach().clone() for name in self._average}
        self._put(self._average)
        try:
            yield
        finally:
            self._put(own)

    def tensors(self) -> dict[str, Tensor]:
        """Give the average by the names of a state dict; empty before the first step."""
        return {n: self._average[name] for n, name in self._names.items() if self._average}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` gave.

        Raises:
            SnapshotError: It is of another model.
        """
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != {n: self._live[name].shape for n, name in self._names.items()}:
            raise SnapshotError("the snapshot's average of the weights (--ema) isn't of this model")
        self._begin(
            {
                name: torch.empty_like(parameter, requires_grad=False).copy_(tensors[name])
                for name, parameter in self._live.items()
            }
        )

    def _begin(self, average: dict[str, Tensor]) -> None:
        self._average = average
        # Grouped, since torch averages lists of one type.
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for name, parameter in self._live.items():
            averages, parameters = by_type.setdefault(parameter.dtype, ([], []))
            averages.append(average[name])
            parameters.append(parameter)
        self._pairs = list(by_type.values())

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._live[name].copy_(value)
