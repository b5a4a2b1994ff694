"""Model buffers (BatchNorm's statistics), one set for each part of a step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from paceline.distributed.device_copies import copy_all, fetch, send
from paceline.gradient_sync.batchnorm import SyncBatchNorm

_ROUNDING = 1e-4
"""Of a buffer's largest value: equal weights on other hardware differ by less, other samples by
more."""


@contextmanager
def stand_in_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    """Let models run in the block on what stands in for samples, without learning from it.

    Modules stay in the mode they are in, and return what they return in training. Only
    normalization layers, and scripted modules, which may be some, are put into evaluation mode,
    since a single sample may have no variance; buffers that forward passes have changed are put
    back in the end. Local to the worker.
    """
    models = list(models)
    norms = [
        part
        for model in models
        for part in model.modules()
        if isinstance(part, _NormBase | SyncBatchNorm | torch.jit.ScriptModule) and part.training
    ]
    # A scripted module takes no hooks; in evaluation mode it learns nothing.
    changes = [_ForwardChanges(m) for m in models if not isinstance(m, torch.jit.ScriptModule)]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True
        for change in changes:
            change.undo()


@final
class _ForwardChanges:
    """Notices which buffers a model's forward passes change, from the first one on."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[tuple[nn.Module, str], tuple[Tensor | None, Tensor | None, int]] = {}
        """Of each buffer: the tensor, its values, and torch's count of changes in place."""
        self._changed: set[tuple[nn.Module, str]] = set()
        self._hooks = (
            model.register_forward_pre_hook(lambda *_: self._note()),
            model.register_forward_hook(lambda *_: self._compare()),
        )

    def undo(self) -> None:
        """Put back what has changed, in place where that is possible; notice nothing more."""
        for hook in self._hooks:
            hook.remove()
        for module, key in self._changed:
            buffer, values, _ = self._before[module, key]
            if buffer is not None and values is not None and buffer.shape == values.shape:
                with torch.no_grad():
                    buffer.copy_(values)
            else:  # resized, or of a kind that can only be replaced
                buffer = buffer if values is None else values
            setattr(module, key, buffer)

    def _note(self) -> None:
        for part in self._model.modules():
            for key, buffer in part._buffers.items():
                if (part, key) in self._before:
                    continue
                if buffer is None or is_lazy(buffer) or buffer.is_inference():
                    self._before[part, key] = (buffer, None, -1)
                else:
                    values = buffer.detach().clone()
                    self._before[part, key] = (buffer, values, buffer._version)

    def _compare(self) -> None:
        for (part, key), (buffer, values, count) in self._before.items():
            is_other = getattr(part, key, None) is not buffer
            if is_other or (buffer is not None and values is not None and buffer._version != count):
                self._changed.add((part, key))


@final
class PartBuffers:
    """A model's buffers, one set for each part (shard) of a step that this worker goes through.

    The model holds those of the part that it is at. Everything here is local to the worker.
    """

    def __init__(self, model: nn.Module, parts: range, *, with_integers: bool) -> None:
        """Start every part with what the model holds.

        Args:
            model: Its buffers may change or be replaced, but keep their names.
            parts: This worker's.
            with_integers: Whether integers (BatchNorm's count of batches) belong to a part too;
                otherwise they are taken to advance alike everywhere.
        """
        self._places = _places(model, with_integers=with_integers)
        self._aliases = _aliases(model, self._places)
        self._parts = parts
        self._at = parts.start
        self._kept: dict[int, list[Tensor]] = {}
        if len(parts) > 1:
            live = list(self.live().values())
            self._kept = {part: [b.detach().clone() for b in live] for part in parts}

    def live(self) -> dict[str, Tensor]:
        """Name the buffers that the model holds now, in sorted order."""
        return {name: module.get_buffer(key) for name, (module, key) in self._places.items()}

    @torch.no_grad()
    def enter(self, part: int) -> None:
        """Put a part's buffers into the model, and keep those of the part before."""
        if part == self._at or not self._places:
            self._at = part
            return
        live = list(self.live().values())
        copy_all(self._kept[self._at], live)
        copy_all(live, self._kept[part])
        self._at = part

    def rows(self) -> Tensor:
        """Copy the buffers of all this worker's parts: (parts, K) float64 on the CPU."""
        live = list(self.live().values())
        if len(self._parts) == 1:
            return pack(live).unsqueeze(0)
        held = [live if part == self._at else self._kept[part] for part in self._parts]
        fetched = fetch([buffer for buffers in held for buffer in buffers])
        sets = [fetched[at : at + len(live)] for at in range(0, len(fetched), max(1, len(live)))]
        return torch.stack([pack(buffers) for buffers in sets or held])

    @torch.no_grad()
    def restore(self, rows: Tensor) -> None:
        """Take over what `rows` gave: (parts, K), of this worker's parts."""
        live = list(self.live().values())
        self._at = self._parts.start
        unpack(rows[0], live)
        for part, row in zip(self._kept, rows, strict=False):
            unpack(row, self._kept[part])

    def name_differing(self, rows: Tensor) -> list[str]:
        """Name the buffers of floating point that differ between parts.

        Those of normalization layers aren't named, nor are differences by rounding.

        Args:
            rows: (parts of the step, K).
        """
        live = self.live()
        named = []
        sizes = [b.numel() for b in live.values()]
        for (name, buffer), values in zip(live.items(), rows.split(sizes, dim=1), strict=True):
            known = values.numel() > 0 and buffer.is_floating_point()
            if not known or isinstance(self._places[name][0], _NormBase):
                continue
            # Compare with the first part, infinities and NaN by where they are.
            finite = values.isfinite()
            numbers = torch.where(finite, values, 0.0)
            spread = (numbers - numbers[:1]).abs().max()
            is_apart = spread > _ROUNDING * numbers.abs().max()
            if is_apart or (finite != finite[:1]).any():
                named.append(name)
        return named

    def averaged(self, rows: Tensor) -> dict[str, Tensor]:
        """Average the buffers of all parts of a step: those of floating point.

        Of integers, which can't be averaged, those of the first part are taken.

        Args:
            rows: (parts of the step, K).

        Returns:
            The buffers by name, of their own shapes and types, on the CPU; one that has several
            names under each of them.
        """
        live = self.live()
        if not live:
            return {}
        # A row holds all buffers end to end: split it once for each dtype, as 64-bit integers are
        # bits.
        mean = rows[0] if len(rows) == 1 else rows.mean(0)
        sizes = [b.numel() for b in live.values()]
        split: dict[torch.dtype, Sequence[Tensor]] = {}
        for dtype in {b.dtype for b in live.values()}:
            chosen = mean if dtype.is_floating_point else rows[0]
            split[dtype] = _from_row(chosen, dtype).split(sizes)
        views = {n: split[b.dtype][at].view(b.shape) for at, (n, b) in enumerate(live.items())}
        return views | {alias: views[name] for alias, name in self._aliases.items()}


def _places(model: nn.Module, *, with_integers: bool) -> dict[str, tuple[nn.Module, str]]:
    saved = model.state_dict(keep_vars=True)
    places = {}
    for name, buffer in sorted(model.named_buffers()):
        kept = buffer.is_floating_point() or (with_integers and not buffer.is_complex())
        # Only what a snapshot holds; `unsaved_buffers.py` watches the others.
        if name in saved and kept:
            path, _, key = name.rpartition(".")
            places[name] = (model.get_submodule(path), key)
    return places


def _aliases(model: nn.Module, names: Mapping[str, object]) -> dict[str, str]:
    """Name the further names of buffers that modules share."""
    known = {id(buffer): name for name, buffer in model.named_buffers() if name in names}
    every = model.named_buffers(remove_duplicate=False)
    return {n: known[id(b)] for n, b in every if id(b) in known and n != known[id(b)]}


def pack(buffers: Sequence[Tensor]) -> Tensor:
    """Lay buffers end to end as float64 on the CPU.

    It holds every smaller float and whole number exactly; of 64 bits the bits themselves are kept.
    """
    if not buffers:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([_to_row(b.flatten()) for b in fetch(buffers)])


@torch.no_grad()
def unpack(packed: Tensor, buffers: Sequence[Tensor]) -> None:
    """Write what `pack` made back into the buffers."""
    parts = packed.split([b.numel() for b in buffers])
    values = [_from_row(part, b.dtype) for part, b in zip(parts, buffers, strict=True)]
    send([value.view(b.shape) for value, b in zip(values, buffers, strict=True)], buffers)


def _to_row(values: Tensor) -> Tensor:
    return values.view(torch.float64) if values.dtype == torch.int64 else values.double()


def _from_row(row: Tensor, dtype: torch.dtype) -> Tensor:
    return row.contiguous().view(dtype) if dtype == torch.int64 else row.to(dtype)


def put(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values, all of the host or all of the buffers' device, into those of the same names."""
    given = [values[name] for name in buffers]
    targets = list(buffers.values())
    if given and given[0].is_cpu:
        send(given, targets)
    else:
        copy_all(targets, given)
