"""Exact counts of what Paceline adds to a step of a loop written by hand.

    python -m benchmarks.step_cost [--check] [--json FILE]

Python opcodes, ATen operators, waits for the device and collectives are the same in every run and
on any machine, so that a check can hold them to the budgets below. The steps are those of the real
training loop on the mnist job, in one process; collectives are counted on two. What happens about
twice a second (`Engine.agree`) is counted by itself.
"""

import multiprocessing
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not declared there

from benchmarks import arena
from benchmarks.arena import SEED, EnoughError, mnist_training, output_to
from benchmarks.counting import Counts, collectives_so_far, count_opcodes, count_operators
from benchmarks.figures import Figure, Report, markdown, parser
from benchmarks.loops import Workers, tuned_loop
from benchmarks.mnist_shaped import mnist_shaped
from paceline.data.memory import TensorData
from paceline.distributed.environment import gpus_asked_of_driver
from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.results.run_directory import RunDirectory
from paceline.training.recipe_session import RecipeTraining
from paceline.training.rng import seed_everything

BATCH = 4
_MOST_COUNTS = 8
SHORT, LONG = 5, 15
"""Steps of the two runs whose difference is taken, so that set-up falls out."""

OPCODES_PER_STEP = 175
"""Python opcodes a step beyond the hand-written loop's; about 20 ns each, several times as much
behind a convolution, which has emptied the caches. The loop by hand has hundreds for what
`zero_grad` and an optimizer's step record for the profiler. Counted with CPython
3.11; the budget leaves some room, since its versions differ by a few percent. About 40 of them note
which collective a worker is in, so that a hang can be told from outside its interpreter; about 15
look for weights of losses, and for batches without a backward pass."""
OPCODES_PER_AGREEMENT = 1560
"""Python opcodes of one exchange, after five steps; about 150 of them, 3 us twice a second, take
the time of the steps and tell waiting for others from communication, about 55 compare what steps
the workers have taken."""
OPERATORS_PER_STEP = -2
"""Two of ours, see below, and not the four by which `zero_grad` and an optimizer's step mark
themselves for the profiler."""
PURPOSES = {
    "aten.detach": "loss and scores: kept without their graph, counted at the next agreement",
}
"""Operators beyond the hand-written loop's and what they are for; any other misses the budget."""
COLLECTIVES_PER_STEP = 0
SYNCS_PER_STEP = 0

LEAVE_OUT = (Path(__file__), Path(arena.__file__))
"""Files whose own code isn't part of either loop."""

Take = Callable[[int], None]
"""Takes so many steps."""


@final
class _Ending:
    """Ends a training after so many steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def __call__(self) -> None:
        if self._left == 0:
            raise EnoughError
        self._left -= 1


@contextmanager
def hand_loop(group: Group) -> Iterator[Take]:
    """Lend the loop written by hand. Collective."""
    seed_everything(SEED)
    who = Workers(rank=group.rank, world_size=group.world_size, batch=BATCH)
    steps = tuned_loop(*_data(group), who, log_every=0).steps

    def take(number: int) -> None:
        for _ in range(number):
            next(steps)

    yield take


@contextmanager
def paceline(group: Group, directory: Path) -> Iterator[tuple[Take, RecipeTraining]]:
    """Lend the real training loop, without the exchanges between the workers. Collective."""
    run = RunDirectory.named(directory)
    settings = {"global_batch": BATCH * group.world_size}
    with mnist_training(settings, run, _data(group), group) as training:
        source = training.train.source

        def take(number: int) -> None:
            training.train.source = source
            training.session.engine.context.progress.next_agreement = sys.maxsize
            arena.run_gated(training, 1, _Ending(number))

        yield take, training


def _data(group: Group) -> tuple[TensorData, TensorData]:
    samples = 10 * LONG * BATCH * group.world_size
    return mnist_shaped(samples, seed=1), mnist_shaped(BATCH, seed=2)


def opcodes_a_step(take: Take) -> Counter[str]:
    """Count Python opcodes by function."""
    short, long = (count_opcodes(partial(take, n), LEAVE_OUT) for n in (SHORT, LONG))
    return _difference(short, long)


def operators_a_step(take: Take) -> Counts:
    """Count ATen operators and waits for the device."""
    short, long = (count_operators(partial(take, n)) for n in (SHORT, LONG))
    return Counts(
        operators=_difference(short.operators, long.operators),
        syncs=_difference(short.syncs, long.syncs),
    )


def _difference(short: Counter[str], long: Counter[str]) -> Counter[str]:
    steps = LONG - SHORT
    found: Counter[str] = Counter()
    for name in long:
        more = long[name] - short[name]
        found[name] = -(-more // steps)  # what isn't the same every step is rounded up
    return +found


def collectives_a_step(take: Take) -> int:
    """Count the collectives of the default process group, those inside DDP included."""
    taken = []
    for number in (SHORT, LONG):
        before = collectives_so_far()
        take(number)
        taken.append(collectives_so_far() - before)
    return -(-(taken[1] - taken[0]) // (LONG - SHORT))


def count_collectives(directory: Path) -> tuple[int, int, int]:
    """Count on two forked workers: Paceline's and the hand loop's a step, and an agreement's."""
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe()
    ranks = [context.Process(target=_rank, args=(r, directory, far)) for r in range(2)]
    for process in ranks:
        process.start()
    far.close()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError("a worker failed; its error is above")
    found: tuple[int, int, int] = near.recv()
    return found


def _rank(rank: int, directory: Path, results: Connection) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = Group(Placement(rank=rank, world_size=2), torch.device("cpu"), "gloo")
    with output_to(directory / "output.txt"):
        with hand_loop(group) as take:
            take(SHORT)
            by_hand = collectives_a_step(take)
        with paceline(group, directory / "run-of-two") as (take, training):
            take(SHORT)
            ours = collectives_a_step(take)
            before = collectives_so_far()
            training.session.engine.agree()
            agreement = collectives_so_far() - before
    if rank == 0:
        results.send((ours, by_hand, agreement))
    dist.destroy_process_group()


@dataclass(kw_only=True)
class Cost:
    """What one process counted."""

    hand_opcodes: Counter[str]
    opcodes: Counter[str]
    """Of one step of Paceline."""
    is_repeatable: bool
    hand: Counts
    ours: Counts
    agreement_opcodes: int
    agreement: Counts

    def more_operators(self) -> dict[str, int]:
        """List the operators a step that the two loops don't share; negative where by hand."""
        ours, hand = self.ours.operators, self.hand.operators
        return {n: ours[n] - hand[n] for n in sorted(ours | hand) if ours[n] != hand[n]}

    def more_opcodes(self) -> dict[str, int]:
        """List the opcodes a step by function, the most first."""
        names = self.opcodes | self.hand_opcodes
        more = {n: self.opcodes[n] - self.hand_opcodes[n] for n in names}
        return dict(sorted(((n, v) for n, v in more.items() if v), key=lambda item: -item[1]))


def count_cost(directory: Path) -> Cost:
    """Count in this process alone."""
    group = Group(Placement(), torch.device("cpu"), "gloo")
    with output_to(directory / "output.txt"):
        with hand_loop(group) as take:
            take(SHORT)
            hand_opcodes, hand = opcodes_a_step(take), operators_a_step(take)
        with paceline(group, directory / "run") as (take, training):
            take(SHORT)
            # Where the machine is busy, something that is due by time may fall into a count.
            counted = [opcodes_a_step(take), opcodes_a_step(take)]
            while counted[-1] != counted[-2] and len(counted) < _MOST_COUNTS:
                counted.append(opcodes_a_step(take))
            ours = operators_a_step(take)
            training.session.engine.agree()
            take(SHORT)
            agreement_opcodes = count_opcodes(lambda: _agree(training), LEAVE_OUT).total()
            take(SHORT)
            agreement = count_operators(lambda: _agree(training))
    return Cost(
        hand_opcodes=hand_opcodes,
        opcodes=min(counted, key=Counter.total),
        is_repeatable=counted[-1] == counted[-2],
        hand=hand,
        ours=ours,
        agreement_opcodes=agreement_opcodes,
        agreement=agreement,
    )


def _agree(training: RecipeTraining) -> None:
    training.session.engine.agree()


def exact(what: str, value: int, at_most: int | None = None, note: str = "") -> Figure:
    """Make a figure of a count."""
    return Figure(what=what, value=value, unit="", at_most=at_most, note=note)


def figures(cost: Cost, collectives: tuple[int, int, int]) -> list[Figure]:
    """Compare the counts with the budgets."""
    by_hand, more = cost.hand_opcodes.total(), cost.more_operators()
    opcodes, operators = cost.opcodes.total() - by_hand, sum(more.values())
    unknown = [name for name, count in more.items() if count > 0 and name not in PURPOSES]
    syncs = cost.ours.syncs.total() - cost.hand.syncs.total()
    repeated = "the same twice" if cost.is_repeatable else "not the same twice"
    return [
        exact("opcodes a step, more than by hand", opcodes, OPCODES_PER_STEP, repeated),
        exact("- by hand", by_hand),
        exact("operators a step, more", operators, OPERATORS_PER_STEP),
        exact("- by hand", cost.hand.operators.total()),
        exact("- for no stated purpose", len(unknown), 0, ", ".join(unknown)),
        exact("waits for the device a step, more", syncs, SYNCS_PER_STEP),
        exact("collectives a step, more", collectives[0] - collectives[1], COLLECTIVES_PER_STEP),
        exact("- by hand", collectives[1]),
        exact("opcodes of an agreement", cost.agreement_opcodes, OPCODES_PER_AGREEMENT),
        exact("- operators", cost.agreement.operators.total(), note="on small CPU tensors, mostly"),
        exact("- fetches of tensors", cost.agreement.syncs.total(), note="two from the device"),
        exact("- collectives", collectives[2], 1),
    ]


def main() -> int:
    """Count and compare with the budgets."""
    arguments = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    scratches = tempfile.TemporaryDirectory(prefix="paceline-bench-")
    with scratches as scratch, gpus_asked_of_driver():  # the loop by hand as well
        directory = Path(scratch)
        for name in ("run", "run-of-two"):
            RunDirectory.named(directory / name).create()
        collectives = count_collectives(directory)
        cost = count_cost(directory)
    operators = [(n, f"{v:+d}", PURPOSES.get(n, "")) for n, v in cost.more_operators().items()]
    print(markdown(("operator", "a step", "for"), operators), end="\n\n")
    opcodes = [(n, f"{v:+d}") for n, v in cost.more_opcodes().items()]
    print(markdown(("function", "opcodes a step"), opcodes))
    report = Report(name="step_cost", figures=figures(cost, collectives))
    report.raw = {"opcodes": cost.more_opcodes(), "operators": cost.more_operators()}
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
