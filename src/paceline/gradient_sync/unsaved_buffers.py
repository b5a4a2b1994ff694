"""Finds state that no snapshot holds: non-persistent buffers that change while training."""

from collections.abc import Mapping
from typing import final

from torch import Tensor, nn

from paceline.errors import JobError
from paceline.gradient_sync.replica_consistency import hash_bits


@final
class UnsavedBuffers:
    """The buffers of models that are left out of their `state_dict`.

    Tables made once (positions, masks) are welcome there, and so are caches that are made anew in
    another size when they are needed. A value that changes from step to step is state: a training
    that goes on from a snapshot, or on other workers, wouldn't have it.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Create the unsaved buffers.

        Args:
            models: By name; on their device.
        """
        self._kept = {name: _Kept(*place) for name, place in _hidden(models).items()}

    def check(self) -> None:
        """Check whether a value has changed since the last check. Local to the worker.

        Costs a look at each of these buffers; only one that was written to is read, with a wait
        for the device.

        Raises:
            JobError: One has; names it.
        """
        changed = [name for name, kept in self._kept.items() if kept.has_changed()]
        if changed:
            raise JobError(
                f"the buffer {', '.join(changed[:5])} changes while training and belongs to no "
                "shard, since it is registered with persistent=False (or holds complex numbers): "
                "resuming from a snapshot, or with other workers, would give other results. "
                "Register it as persistent, and of real numbers"
            )


@final
class _Kept:
    """A copy of one buffer from the last check."""

    def __init__(self, buffer: Tensor, module: nn.Module, key: str) -> None:
        self._module = module
        self._key = key
        self._note(buffer)

    def has_changed(self) -> bool:
        """Tell whether there are other values now, in the same shape and type."""
        now = getattr(self._module, self._key)
        if not isinstance(now, Tensor):
            return False
        # autograd counts writes in `_version`; inference tensors have none, and are always read.
        if now is self._buffer and not now.is_inference() and now._version == self._version:
            return False
        before, shape, dtype = self._bits, self._buffer.shape, self._buffer.dtype
        self._note(now)
        return (now.shape, now.dtype) == (shape, dtype) and self._bits != before

    def _note(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._version = 0 if buffer.is_inference() else buffer._version
        self._bits = int(hash_bits(buffer))


def _hidden(models: Mapping[str, nn.Module]) -> dict[str, tuple[Tensor, nn.Module, str]]:
    """Name the buffers that aren't in the models' state, with the module that holds them."""
    buffers = {}
    for prefix, model in models.items():
        saved = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name not in saved or buffer.is_complex():
                path, _, key = name.rpartition(".")
                full = name if len(models) == 1 else f"{prefix}.{name}"
                buffers[full] = (buffer, model.get_submodule(path), key)
    return buffers
