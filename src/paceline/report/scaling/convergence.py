"""How the trainings of a study learned: their losses, and when each reached a common one."""

from collections.abc import Sequence
from typing import Literal

from paceline.results.study import CurvePoint, SizeResult, Study

LossKind = Literal["validation", "training"]


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


def reach_together(
    study: Study, sizes: Sequence[SizeResult]
) -> tuple[float, tuple[CurvePoint | None, ...]] | None:
    """Find the lowest loss that each of the trainings reached; None where there are none.

    Returns:
        The loss, and the point where each had it first; None where that wasn't written down.
    """
    kind = loss_kind(study)
    lowest = [min(known) for size in sizes if (known := _known(size, kind))]
    if not lowest:
        return None
    common = max(lowest)
    return common, tuple(_reach(size, kind, common) for size in sizes)


def _reach(size: SizeResult, kind: LossKind, common: float) -> CurvePoint | None:
    for point in () if size.trained is None else size.trained.curve:
        found = loss_of(point, kind)
        if found is not None and found <= common:
            return point
    return None


def _known(size: SizeResult, kind: LossKind) -> list[float]:
    curve = () if size.trained is None else size.trained.curve
    return [found for point in curve if (found := loss_of(point, kind)) is not None]
