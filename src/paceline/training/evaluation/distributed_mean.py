"""Exact means over all samples of an evaluation, on any number of workers."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.distributed.device import widest_float
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.errors import JobError

Metrics = dict[str, float]
BatchMetrics = Callable[[object], Mapping[str, Tensor | float]]
"""Takes a batch as the loader gives it; gives each figure as its mean over the batch's samples (a
number, or a tensor with one element), or by sample (a tensor with one element for each)."""


def average(
    judge: BatchMetrics, batches: Iterable[Batch], group: Group, division: Division
) -> tuple[Metrics, int]:
    """Average what is found on each batch over all samples of all workers. Collective.

    Args:
        judge: Called with each batch's content.
        batches: This worker's; workers may have unequal numbers of them, also none.
        division: Which parts of the evaluation each has. The means depend on the number of parts,
            never on the number of workers.

    Returns:
        The means, and the number of samples.

    Raises:
        JobError: The batches gave different figures, or something else than figures.
    """
    own_parts = division.parts_of(group.rank)
    names: tuple[str, ...] | None = None
    # One (figures,) for each batch, on the device, by part.
    sums: list[list[Tensor]] = [[] for _ in own_parts]
    samples = [0] * len(own_parts)
    for batch in batches:
        figures = _checked(judge(batch.content))
        names = names or tuple(figures)
        if tuple(figures) != names:
            raise JobError(
                f"an evaluation gave the figures {', '.join(names)} for one batch and "
                f"{', '.join(figures)} for another; give the same for all"
            )
        rows = [_summed(name, figures[name], batch.local, group.device) for name in names]
        part = batch.part - own_parts.start if division.is_fixed else 0
        if rows:
            sums[part].append(torch.stack(rows))
        samples[part] += batch.local
    # Summed in order of the parts, so that the number of workers rounds nothing otherwise.
    names = _agreed_names(names, group)
    own = torch.stack([_counted(s, n, len(names)) for s, n in zip(sums, samples, strict=True)])
    gathered = division.in_order(group.gather_rows(division.padded(own)))  # (parts, figures + 1)
    *totals, count = gathered.sum(0).tolist()
    means = (
        {name: total / count for name, total in zip(names, totals, strict=True)} if count else {}
    )
    return means, int(count)


def _checked(figures: object) -> Mapping[str, Tensor | float]:
    """Refuse what a judge gave where it isn't figures by name: users write judges."""
    if isinstance(figures, Mapping) and all(isinstance(name, str) for name in figures):
        return figures
    raise JobError(
        f"an evaluation's function gave {_kind(figures)}; it should give figures by name, such as "
        '{"accuracy": scores.argmax(1) == labels}'
    )


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "a dictionary whose keys aren't all text"
    return "nothing (None)" if value is None else f"an object of type {type(value).__name__}"


def _counted(sums: Sequence[Tensor], samples: int, figures: int) -> Tensor:
    """Add one part's batches up: (figures + 1,) float64, the last one the number of samples."""
    added = torch.stack(list(sums)).sum(0).cpu().double() if sums else torch.zeros(figures).double()
    return torch.cat([added, torch.tensor([samples], dtype=torch.float64)])


def _summed(name: str, value: Tensor | float, samples: int, device: torch.device) -> Tensor:
    """Give a figure's sum over a batch: () on the device, float64 where it has that."""
    if not isinstance(value, Tensor):
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise JobError(
                f"the figure {name!r} of an evaluation is {_kind(value)}; give a number or a tensor"
            ) from None
        return torch.tensor(number * samples, dtype=widest_float(device), device=device)
    detached = value.detach().to(device, widest_float(device))
    if detached.numel() == 1:
        return detached.reshape(()) * samples
    if detached.numel() == samples:
        return detached.sum()
    raise JobError(
        f"the figure {name!r} of an evaluation has {detached.numel()} elements for a batch of "
        f"{samples} samples; give its mean over the batch, or one element for each sample"
    )


def _agreed_names(names: tuple[str, ...] | None, group: Group) -> tuple[str, ...]:
    """Send the figures' names to workers without a batch. Collective."""
    texts = group.gather_texts("\n".join(names) if names else "")
    known = next((text for text in texts if text), "")
    if any(text not in ("", known) for text in texts):
        raise JobError("the workers' evaluations gave different figures: " + "; ".join(texts))
    return tuple(known.splitlines())
