"""Checks that a model's weights are finite, and loads those of a snapshot."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.errors import SnapshotError

_PRUNED = (
    "Layers that the loop prunes need these names before it: torch.nn.utils.prune.identity(layer, "
    "'weight') before s.prepare(...)"
)


def are_finite(parameters: list[Tensor]) -> bool:
    """Tell whether no parameter holds NaN or infinity; the same on every worker."""
    # Finite weights may have a norm that isn't, but no other way round: one cheap pass settles all
    # ordinary cases.
    if not parameters or torch.stack(torch._foreach_norm(parameters)).sum().isfinite():
        return True
    return all(bool(parameter.isfinite().all()) for parameter in parameters)


def evaluated_weights(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Choose what a snapshot's model is evaluated with: with `--ema` the average of its weights.

    Args:
        tensors: All of the snapshot's.

    Returns:
        By the names of the model's state dict; buffers are those of training.
    """
    return {**tensors.get("model", {}), **tensors.get("ema", {})}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a snapshot's weights into a model, in the model's own memory format.

    Raises:
        SnapshotError: Names or shapes differ; the first differences are named.
    """
    own = model.state_dict()
    wrong = [f"it lacks {name}" for name in own.keys() - tensors.keys()]
    wrong += [f"it holds {name}, which the model lacks" for name in tensors.keys() - own.keys()]
    wrong += [
        f"{name} has shape {tuple(tensors[name].shape)} in it, {tuple(own[name].shape)} here"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    if wrong:
        shown = "; ".join(sorted(wrong)[:5])
        strange = tensors.keys() - own.keys()
        is_pruned = any(
            name.endswith("_orig") and f"{name.removesuffix('_orig')}_mask" in strange
            for name in strange
        )
        remedy = f". {_PRUNED}" if is_pruned else ""
        raise SnapshotError(f"the snapshot's weights don't fit the model: {shown}{remedy}")
    model.load_state_dict(dict(tensors))
