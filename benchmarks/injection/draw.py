"""What is drawn for one run: its faults, their moment, its workers. Pure, fixed by a seed."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Form = Literal["recipe", "file", "script"]
"""A recipe by its name, a recipe in a file, or a script through `paceline run`."""
FORMS: tuple[Form, ...] = ("recipe", "file", "script")

_MOST_WORKERS = 3
_SECOND_FAULT = 0.4
_RESUMES = 4


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What has to be known of a kind of fault before it is drawn."""

    least_workers: int = 1
    comes_first: bool = False
    """Whether another fault can follow it: the training isn't done then."""
    comes_second: bool = False
    """Whether it can follow another fault."""
    form: Form | None = None
    """The only form of training that it can be done to."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One run."""

    seed: int
    number: int
    kinds: tuple[str, ...]
    """One fault, or two."""
    form: Form
    workers: int
    rank: int
    """Of the worker that it is done to, where it is done to one."""
    moment: float
    """After which share of the steps that are left, in [0.05, 0.85)."""
    delay_s: float
    """For what no step marks: a start, a report, a second fault; in [0, 1.5)."""
    resume_on: tuple[int, ...]
    """Workers of each resume."""
    loaders: int
    """Loader processes of each worker; of a script."""


def draw(seed: int, number: int, traits: Mapping[str, Traits]) -> Draw:
    """Draw a run. The same seed and number give the same run for the same kinds.

    Kinds come in shuffled rounds, so that all have been drawn equally often after each round.

    Args:
        seed: Of all runs.
        number: From 0.
        traits: All kinds, those that this machine can't do included.
    """
    order = sorted(traits)
    turn, place = divmod(number, len(order))
    random.Random(f"{seed} round {turn}").shuffle(order)
    first = order[place]
    chance = random.Random(f"{seed} run {number}")
    kinds = [first]
    if chance.random() < _SECOND_FAULT and traits[first].comes_first:
        kinds.append(chance.choice(sorted(name for name in traits if traits[name].comes_second)))
    least = max(traits[name].least_workers for name in kinds)
    workers = max(least, chance.randint(1, _MOST_WORKERS))
    drawn = chance.choice(FORMS)
    resume_on = [max(least, chance.randint(1, _MOST_WORKERS)) for _ in range(_RESUMES)]
    form = traits[first].form or drawn
    return Draw(
        seed=seed,
        number=number,
        kinds=tuple(kinds),
        form=form,
        workers=workers,
        rank=chance.randrange(workers),
        moment=chance.uniform(0.05, 0.85),
        delay_s=chance.uniform(0.0, 1.5),
        resume_on=tuple(resume_on),
        loaders=chance.randint(0, 1) if form == "script" else 0,
    )


def runs(
    seed: int,
    traits: Mapping[str, Traits],
    left_out: Iterable[str] = (),
    only: Sequence[str] = (),
) -> Iterator[Draw]:
    """Draw run after run, without those that can't be done here or aren't asked for.

    Args:
        seed: Of all runs.
        traits: All kinds.
        left_out: Kinds that this machine can't do.
        only: Kinds to do; empty for all. They alone are done then, without a second fault of
            another kind.
    """
    missing = set(left_out)
    if not set(traits) - missing or (only and not set(only) - missing):
        return
    number = 0
    while True:
        found = draw(seed, number, traits)
        number += 1
        if only and (found.kinds[0] not in only or not set(found.kinds) <= set(only)):
            continue
        if not missing & set(found.kinds):
            yield found
