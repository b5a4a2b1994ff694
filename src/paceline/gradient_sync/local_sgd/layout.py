"""Lays out a model's weights as one flat buffer, divided into equal parts."""

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from paceline.errors import UsageError


@final
class LocalLayout:
    """Where each parameter lies in a flat buffer; a part may begin or end within a parameter.

    Within a parameter elements lie as they do in memory: the same on every worker, whose models are
    laid out alike.
    """

    def __init__(self, parameters: Mapping[str, Tensor], parts: int, multiple: int) -> None:
        """Args:
        parameters: By name, all on one device.
        parts: How many parts there are.
        multiple: Of which the number of elements of a part is one.

        Raises:
            UsageError: A parameter has gaps in memory.
        """
        self.parameters = dict(parameters)
        self._offsets: dict[str, int] = {}
        dtype, total = torch.float32, 0
        # Place parameters one after another, in one dtype that holds all of them.
        for name, parameter in self.parameters.items():
            numbers = _numbers(parameter)
            if has_gaps(parameter):
                raise UsageError(
                    f"{name} has gaps in memory, with which it can't be averaged by --sync local "
                    "or diloco: build the model with parameters that are .contiguous()"
                )
            self._offsets[name] = total
            total += numbers.numel()
            dtype = torch.promote_types(dtype, numbers.dtype)
        self.dtype = dtype
        """Of the flat buffers: fp32, or fp64 where a parameter is of that."""
        self.total = total
        """Elements of all parameters."""
        self.part_size = -(-total // (parts * multiple)) * multiple
        """Elements of a part, zeros at the end of the last ones included."""
        self._parts = parts

    @property
    def size(self) -> int:
        """Elements of a flat buffer."""
        return self._parts * self.part_size

    def is_empty(self, part: int) -> bool:
        """Tell whether a part has no weights: a small model in many parts."""
        return part * self.part_size >= self.total

    def slice_of(self, part: int | None) -> slice:
        """Say where a part lies in a flat buffer; None is the whole of it."""
        if part is None:
            return slice(0, self.size)
        return slice(part * self.part_size, (part + 1) * self.part_size)

    def zeros(self, device: torch.device) -> Tensor:
        """Make a flat buffer: (size,)."""
        return torch.zeros(self.size, dtype=self.dtype, device=device)

    def read(self, part: int | None, flat: Tensor) -> None:
        """Copy a part of the weights into a flat buffer."""
        weights, places = self._pairs(part, flat)
        if weights:
            torch._foreach_copy_(places, weights)

    def write(self, part: int | None, flat: Tensor) -> None:
        """Copy a part of a flat buffer into the weights."""
        weights, places = self._pairs(part, flat)
        if weights:
            torch._foreach_copy_(weights, places)

    def add(self, part: int | None, flat: Tensor) -> None:
        """Add a part of a flat buffer to the weights, in the wider of their two types."""
        weights, places = self._pairs(part, flat)
        if weights:
            torch._foreach_add_(weights, places)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Show a flat buffer as the parameters' shapes: views, by name."""
        views = {}
        for name, parameter in self.parameters.items():
            numbers = _numbers(parameter)
            views[name] = flat.as_strided(numbers.shape, numbers.stride(), self._offsets[name])
        return views

    def put(self, flat: Tensor, values: Mapping[str, Tensor]) -> None:
        """Fill a flat buffer with what `named` showed."""
        for name, view in self.named(flat).items():
            view.copy_(values[name])

    def _pairs(self, part: int | None, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Pair pieces of the weights with those of a flat buffer: views."""
        pairs = list(self._pieces(part, flat))
        return [weight for weight, _ in pairs], [place for _, place in pairs]

    def _pieces(self, part: int | None, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        chosen = self.slice_of(part)
        for name, parameter in self.parameters.items():
            numbers, offset = _numbers(parameter), self._offsets[name]
            # The intersection of the parameter with the part.
            begin = max(offset, chosen.start)
            end = min(offset + numbers.numel(), chosen.stop)
            if begin < end:
                row = numbers.as_strided((numbers.numel(),), (1,))
                yield row[begin - offset : end - offset], flat[begin:end]


def _numbers(parameter: Tensor) -> Tensor:
    """Give a parameter's real numbers."""
    plain = parameter.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def has_gaps(parameter: Tensor) -> bool:
    """Tell whether the elements don't fill a stretch of memory, in whatever order."""
    # In order of stride each must be the product of the sizes below it, whatever the memory format.
    numbers, expected = _numbers(parameter), 1
    for stride, size in sorted(zip(numbers.stride(), numbers.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return True
        expected *= size
    return False
