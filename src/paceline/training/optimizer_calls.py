"""An optimizer's own `step()` and `zero_grad()`: a script may keep these calls as they are."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Protocol, final

from torch.optim import Optimizer

from paceline.errors import UsageError


class Updates(Protocol):
    """What runs the steps of a session."""

    is_updating: bool
    """Whether it is the session itself that calls the optimizers."""

    @property
    def holds_pieces(self) -> bool:
        """Whether gradients are there to which further pieces of a batch will be added."""

    def update_by_script(self, optimizer: Optimizer) -> None:
        """Update with what `s.backward` has left; nothing before the last piece of a batch."""


@final
class OwnStep:
    """Leads an optimizer's calls by the script to the session; the optimizer stays what it is."""

    def __init__(self, optimizer: Optimizer, updates: Updates) -> None:
        """Args:
        optimizer: Its methods are replaced, on this object alone.
        updates: Where they lead.
        """
        self._updates: Updates | None = updates
        names = vars(optimizer)
        # A learning-rate scheduler wraps `step` again, and wants a method for it.
        names["step"] = MethodType(self._step_around(optimizer.step), optimizer)
        names["zero_grad"] = MethodType(self._zero_around(optimizer.zero_grad), optimizer)

    def release(self) -> None:
        """Let the optimizer's calls be its own again."""
        self._updates = None

    def _step_around(self, plain: Callable[..., object]) -> Callable[..., object]:
        @wraps(plain)
        def step(optimizer: Optimizer, *args: object, **kwargs: object) -> object:
            if self._updates is None or self._updates.is_updating:
                return plain(*args, **kwargs)
            if args or kwargs:
                raise UsageError(
                    f"{type(optimizer).__name__}.step(closure): a session runs each forward and "
                    "backward pass once; use an optimizer whose step needs no closure"
                )
            self._updates.update_by_script(optimizer)
            return None

        return step

    def _zero_around(self, plain: Callable[..., None]) -> Callable[..., None]:
        @wraps(plain)
        def zero_grad(_: Optimizer, *args: object, **kwargs: object) -> None:
            if self._updates is None or not self._updates.holds_pieces:
                plain(*args, **kwargs)

        return zero_grad
