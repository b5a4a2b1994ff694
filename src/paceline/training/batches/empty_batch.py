"""A step of a worker that has no sample of it: the model computes, and nothing comes of it."""

from contextlib import ExitStack
from typing import final

from torch import nn

from paceline.training.evaluation.evaluator import evaluating


@final
class StandIn:
    """Has a model run in evaluation mode for the length of a step.

    BatchNorm and the counters see nothing of it, and its gradient weighs zero.
    """

    def __init__(self) -> None:
        """Stand for nobody yet."""
        self.mode: ExitStack | None = None
        """Puts the model back into the mode that it had; None where no step is stood in for."""

    def begin(self, model: nn.Module) -> None:
        """Begin the step of a worker without samples."""
        self.mode = ExitStack()
        self.mode.enter_context(evaluating(model))

    def end(self) -> None:
        """End it; nothing where there is none."""
        if self.mode is not None:
            self.mode.close()
            self.mode = None
