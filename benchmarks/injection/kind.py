"""A kind of fault: how it is done, how the command it is done to is to end, and what that says."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.injection.draw import Form, Traits
from benchmarks.injection.inside import Fault, Place
from benchmarks.injection.training import BrokenPromiseError, MissedError, Training

Act = Callable[[Training], object]

STARTS_AGAIN = r"All workers start again from "
STOPPED = r"Stopped\. (Resume|Start again)"
STOPPED_EARLY = rf"{STOPPED}|Stopped before the training began"


def nothing(training: Training) -> None:
    """Do nothing."""


def nothing_is_missing() -> str:
    """Need nothing."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table."""

    name: str
    play: Act
    """Starts a command, does the fault to it, and waits for its end; or several commands."""
    strike: Act | None = None
    """The fault alone, where it can be done to a command that runs already."""
    codes: tuple[int, ...] = (0,)
    """How the command may end."""
    says: str = ""
    """A pattern of what it prints."""
    needs: Callable[[], str] = nothing_is_missing
    """Says what this machine lacks for it; empty for nothing."""
    traits: Traits = field(default_factory=Traits)


def struck(  # noqa: PLR0913  # a row of a table, by keyword
    name: str,
    strike: Act,
    *,
    codes: tuple[int, ...] = (0,),
    says: str = "",
    before: Act = nothing,
    after: Act = nothing,
    needs: Callable[[], str] = nothing_is_missing,
    least_workers: int = 1,
    comes_second: bool = True,
    form: Form | None = None,
) -> Kind:
    """Make a kind that is done from outside, at the drawn moment.

    Args:
        name: Of the kind.
        strike: Does it.
        codes: How the command may end.
        says: A pattern of what it prints.
        before: Done before the command starts.
        after: Done after it has ended.
        needs: Says what is missing here.
        least_workers: Of the training.
        comes_second: Whether it may be drawn as a second fault.
        form: The only form of training.
    """

    def play(training: Training) -> None:
        before(training)
        training.start()
        training.reach()
        strike(training)
        training.end(codes, says)
        after(training)

    alone = before is not nothing or after is not nothing
    return Kind(
        name=name,
        play=play,
        strike=None if alone else strike,
        codes=codes,
        says=says,
        needs=needs,
        traits=Traits(
            least_workers=least_workers,
            form=form,
            comes_first=0 not in codes or (codes == (0,) and not alone),
            comes_second=comes_second and not alone,
        ),
    )


def inside(  # noqa: PLR0913  # a row of a table, by keyword
    name: str,
    do: str,
    where: Place,
    *,
    codes: tuple[int, ...] = (0,),
    says: str = "",
    options: Sequence[str] = (),
    before: Act = nothing,
    after: Act = nothing,
    needs: Callable[[], str] = nothing_is_missing,
    least_workers: int = 1,
    form: Form | None = None,
    rank: int | None = None,
) -> Kind:
    """Make a kind that a worker does to itself, at the drawn moment.

    Args:
        name: Of the kind.
        do: A name of `inside.ACTS`.
        where: In which part of the training.
        codes: How the command may end.
        says: A pattern of what it prints.
        options: More options of the command.
        before: Done before the command starts.
        after: Done after it has ended.
        needs: Says what is missing here.
        least_workers: Of the training.
        form: The only form of training.
        rank: Which worker does it; the drawn one by default.
    """

    def play(training: Training) -> None:
        before(training)
        training.options += options
        step = 0 if where == "build" else training.steps_to_do()
        on = training.rank if rank is None else rank
        training.fault_inside(Fault(do=do, where=where, rank=on, step=step))
        training.start(held=False)
        training.end(codes, says)
        if not training.has_happened():
            raise BrokenPromiseError(f"the fault wasn't done: {do} in {where}")
        after(training)

    traits = Traits(least_workers=least_workers, form=form, comes_first=0 not in codes)
    return Kind(name=name, play=play, codes=codes, says=says, needs=needs, traits=traits)


def between(
    name: str,
    damage: Act,
    *,
    codes: tuple[int, ...] = (0,),
    says: str = "",
    mend: Act = nothing,
    needs: Callable[[], str] = nothing_is_missing,
) -> Kind:
    """Make a kind that is done to the files of a training that was stopped.

    Args:
        name: Of the kind.
        damage: Does it.
        codes: How the command to resume may end.
        says: A pattern of what that prints.
        mend: Undoes it, after that.
        needs: Says what is missing here.
    """

    def play(training: Training) -> None:
        stop_orderly(training)
        damage(training)
        training.start(held=False)
        training.end(codes, says)
        mend(training)

    return Kind(name=name, play=play, codes=codes, says=says, needs=needs)


def stop_orderly(training: Training) -> None:
    """Start, and stop by a signal at the drawn moment: what is wanted is a training half done."""
    training.start()
    training.reach()
    training.signal(signal.SIGTERM, training.launcher)
    training.end((75,), STOPPED)


def do_both(training: Training, first: Kind, second: Kind) -> bool:
    """Do two faults to one command, the second a moment later; tell whether that came in time."""
    assert first.strike is not None
    assert second.strike is not None
    training.start()
    training.reach()
    first.strike(training)
    training.release()
    time.sleep(training.drawn.delay_s)
    try:
        second.strike(training)
    except MissedError:
        training.end(first.codes, first.says)
        return False
    # Which of them ends the command, and gets told, is a matter of moments.
    training.end((*first.codes, *second.codes), f"{first.says}|{second.says}")
    return True
