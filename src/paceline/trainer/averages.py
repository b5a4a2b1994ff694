"""Exact means over all samples of an evaluation, on any number of workers."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.dist.group import Group
from paceline.errors import JobError

Figures = dict[str, float]
Judge = Callable[[object], Mapping[str, Tensor | float]]
"""Takes a batch as the loader gives it; gives each figure as its mean over the batch's samples (a
number, or a tensor with one element), or by sample (a tensor with one element for each)."""


def average(judge: Judge, batches: Iterable[Batch], group: Group) -> tuple[Figures, int]:
    """Average what is found on each batch over all samples of all workers. Collective.

    Args:
        judge: Called with each batch's content.
        batches: This worker's; workers may have unequal numbers of them, also none.
        group: The workers.

    Returns:
        The means, and the number of samples.

    Raises:
        JobError: The batches gave different figures.
    """
    names: tuple[str, ...] | None = None
    sums: list[Tensor] = []  # one (figures,) float64 for each batch, on the device
    samples = 0
    for batch in batches:
        found = judge(batch.content)
        names = names or tuple(found)
        if tuple(found) != names:
            raise JobError(
                f"an evaluation gave the figures {', '.join(names)} for one batch and "
                f"{', '.join(found)} for another; give the same for all"
            )
        rows = [_summed(name, found[name], batch.local, group.device) for name in names]
        if rows:
            sums.append(torch.stack(rows))
        samples += batch.local
    names = _agreed_names(names, group)
    own = torch.stack(sums).sum(0).cpu() if sums else torch.zeros(len(names), dtype=torch.float64)
    counted = torch.cat([own, torch.tensor([samples], dtype=torch.float64)])
    *totals, count = group.gather_rows(counted).sum(0).tolist()
    means = (
        {name: total / count for name, total in zip(names, totals, strict=True)} if count else {}
    )
    return means, int(count)


def _summed(name: str, value: Tensor | float, samples: int, device: torch.device) -> Tensor:
    """Give a figure's sum over a batch: () float64 on the device."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value) * samples, dtype=torch.float64, device=device)
    detached = value.detach().to(device, torch.float64)
    if detached.numel() == 1:
        return detached.reshape(()) * samples
    if detached.numel() == samples:
        return detached.sum()
    raise JobError(
        f"the figure {name!r} of an evaluation has {detached.numel()} elements for a batch of "
        f"{samples} samples; give its mean over the batch, or one element for each sample"
    )


def _agreed_names(names: tuple[str, ...] | None, group: Group) -> tuple[str, ...]:
    """Let workers without a batch know the figures' names. Collective."""
    told = group.gather_texts("\n".join(names) if names else "")
    known = next((text for text in told if text), "")
    if any(text not in ("", known) for text in told):
        raise JobError("the workers' evaluations gave different figures: " + "; ".join(told))
    return tuple(known.splitlines())
