"""How the trainings of a study learned: their losses, and when each reached a common one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.results.study import CurvePoint, SizeResult, Study

LossKind = Literal["validation", "training"]


@dataclass(frozen=True, kw_only=True)
class LossReached:
    """When one training first had the common loss; None where it wasn't written down."""

    size: SizeResult
    time_s: float | None
    samples: float | None


@dataclass(frozen=True, kw_only=True)
class CommonLoss:
    """The lowest loss that every training reached, and when each did."""

    kind: LossKind
    loss: float
    sizes: tuple[LossReached, ...]


def trained_sizes(study: Study) -> tuple[SizeResult, ...]:
    """The sizes whose training has a loss to show."""
    kind = loss_kind(study)
    return tuple(size for size in study.sizes if _known(size, kind))


def loss_kind(study: Study) -> LossKind:
    """Choose the validation loss, and the training loss where nothing was evaluated."""
    evaluated = any(_known(size, "validation") for size in study.sizes)
    return "validation" if evaluated else "training"


def loss_of(point: CurvePoint, kind: LossKind) -> float | None:
    """Give a point's loss; None where it has none."""
    return point.val_loss if kind == "validation" else point.train_loss


def reach_together(study: Study, sizes: Sequence[SizeResult]) -> CommonLoss | None:
    """Find the lowest loss that each of the trainings reached; None where there are none."""
    kind = loss_kind(study)
    lowest = [min(known) for size in sizes if (known := _known(size, kind))]
    if not lowest:
        return None
    common = max(lowest)
    return CommonLoss(
        kind=kind, loss=common, sizes=tuple(_reach(size, kind, common) for size in sizes)
    )


def _reach(size: SizeResult, kind: LossKind, common: float) -> LossReached:
    curve = () if size.trained is None else size.trained.curve
    for point in curve:
        found = loss_of(point, kind)
        if found is not None and found <= common:
            return LossReached(size=size, time_s=point.time_s, samples=point.samples)
    return LossReached(size=size, time_s=None, samples=None)


def _known(size: SizeResult, kind: LossKind) -> list[float]:
    curve = () if size.trained is None else size.trained.curve
    return [found for point in curve if (found := loss_of(point, kind)) is not None]
