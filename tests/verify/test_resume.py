"""A training that is killed and resumed, compared with an undisturbed one."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.results.json_object import entries
from paceline.verify import causes, resume_causes
from paceline.verify.causes import Cause
from paceline.verify.compare import LEAST, given_limits
from paceline.verify.events import (
    Backward,
    Drawn,
    Drew,
    Evaluated,
    Event,
    FileRead,
    Loaded,
    Printed,
    Scaled,
    Stepped,
    Wrote,
)
from paceline.verify.resume import (
    Launches,
    ResumeResult,
    choose_again,
    choose_step,
    compare_resumed,
)
from paceline.verify.resume_report import resume_report
from paceline.verify.tensor_sketch import mark
from paceline.verify.trace import Trace
from paceline.verify.verdict import Verdict
from tests.verify.conftest import Verify
from tests.verify.made import begun, launch, stepped, tensor_of, trace_of, trained

# What follows from records.

STEPS = 6


def weight_after(step: int) -> float:
    return 1.0 + 0.1 * step


def weights(value: float) -> tuple[object, ...]:
    return (mark(tensor_of(value), whole=True),)


def events_of(first: int, last: int, **changes: object) -> list[list[Event]]:
    """Make steps `first` to before `last`; changes are of the first one."""
    steps = []
    for number in range(first, last):
        events = trained([f"s{number}"], 1.0, 0.5, weight_after(number + 1))
        is_first = number == first
        begun_with = {"before": weights(weight_after(number)), "state_before": f"state-{number}"}
        own = replace(
            stepped(0.5, weight_after(number + 1), rate=0.1 / (1 + number)),
            state=f"state-{number + 1}",
            **({**begun_with, **changes} if is_first else {}),  # type: ignore[arg-type]
        )
        steps.append([*events[:-1], own])
    return steps


def batch_with(event: Event, **changes: object) -> Drawn:
    assert isinstance(event, Drawn)
    return replace(event, **changes)  # type: ignore[arg-type]


def part(first: int, *, last: int = STEPS, **changes: object) -> Trace:
    """Make a launch of one worker."""
    return launch(events_of(first, last, **changes))


def judged(
    *resumed: Trace,
    whole: Trace | None = None,
    killed: Trace | None = None,
    saved: Sequence[str] = ("last.pt",),
) -> ResumeResult:
    whole = part(0) if whole is None else whole
    cut = replace(whole, only=whole.steps[:4]) if killed is None else killed
    launches = Launches(
        whole=whole,
        killed=cut,
        kill_at=4,
        resumed=resumed,
        saved=tuple(saved),
        cut_at=50,
    )
    return compare_resumed(launches, given_limits(LEAST))


def causes_of(found: ResumeResult) -> list[str]:
    return [str(finding.cause) for finding in found.findings]


@pytest.mark.parametrize("begins_at", [1, 3, 4])
def test_the_step_that_it_goes_on_after_is_found_by_the_weights(begins_at: int) -> None:
    found = judged(part(begins_at))
    assert (found.verdict, found.cases[0].begins_at, found.findings) == (
        Verdict.SAME_BITS,
        begins_at,
        (),
    )
    text = resume_report(found).as_text()
    assert text.startswith(
        f"the same training when it is killed after 4 steps, resumed after {begins_at}: bit for bit"
    )
    assert f"resumed      {begins_at + 1} to 6" in text
    assert resume_report(found).as_json()["resumed_after"] == [begins_at]


def test_it_is_killed_and_resumed_twice() -> None:
    found = judged(part(3, last=4), part(4))
    assert found.verdict == Verdict.SAME_BITS
    assert "killed after 4 and 4 steps, resumed after 3 and 4" in resume_report(found).as_text()
    content = resume_report(found).as_json()
    assert [content["killed_after"], content["resumed_after"]] == [[4, 4], [3, 4]]
    forgets = judged(part(3, last=4), part(4, state_before=""))
    assert causes_of(forgets) == ["optimizer-not-restored"]
    # The second says nothing more where the first one is another training.
    both = judged(part(3, last=4, state_before=""), part(4, rates=(9.0,)))
    assert (causes_of(both), len(both.cases)) == (["optimizer-not-restored"], 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rates": (0.2,)}, [resume_causes.SCHEDULE_NOT_RESTORED]),
        ({"state_before": ""}, [resume_causes.OPTIMIZER_NOT_RESTORED]),
        ({"before": weights(weight_after(3) + 1e-3)}, [resume_causes.WEIGHTS_NOT_RESTORED]),
        (
            {"rates": (0.2,), "state_before": "state-0"},
            [resume_causes.OPTIMIZER_NOT_RESTORED, resume_causes.SCHEDULE_NOT_RESTORED],
        ),
        ({"gradients": weights(0.6)}, [causes.UNKNOWN]),
    ],
)
def test_what_isnt_restored_is_named(changes: dict[str, object], named: list[Cause]) -> None:
    found = judged(part(3, **changes))  # type: ignore[arg-type]
    assert [finding.cause for finding in found.findings] == named
    assert (found.verdict, found.is_good) == (Verdict.DIFFERENT, False)
    assert all(finding.step == 3 for finding in found.findings)
    number = f"{len(named)} cause{'s' if len(named) > 1 else ''}"
    assert resume_report(found).as_text().startswith(f"different: {number}: {named[0]}")


@pytest.mark.parametrize("state", ["state-1", ""])
def test_each_of_several_optimizers_has_to_be_restored(state: str) -> None:
    optimizers = (1, 0, 0, 0, 1, 0)

    def of(trace: Trace, first: int) -> Trace:
        owners = optimizers[first:]
        steps = (
            replace(
                step, stepped=(replace(step.stepped[0], optimizer=owner, names=(f"w{owner}",)),)
            )
            for step, owner in zip(trace.steps, owners, strict=False)
        )
        return replace(trace, only=tuple(steps))

    first, second, third = of(part(3), 3).steps
    own = replace(second.stepped[0], state_before=state, before=second.stepped[0].weights)
    resumed = replace(part(3), only=(first, replace(second, stepped=(own,)), third))
    found = judged(resumed, whole=of(part(0), 0))
    named = [] if state else [(resume_causes.OPTIMIZER_NOT_RESTORED, 4)]
    assert [(finding.cause, finding.step) for finding in found.findings] == named


def test_an_optimizer_without_a_state_has_none_to_restore() -> None:
    def plain(trace: Trace) -> Trace:
        def without(step: Stepped) -> Stepped:
            return replace(step, state="", state_before="")

        steps = (replace(s, stepped=tuple(map(without, s.stepped))) for s in trace.steps)
        return replace(trace, only=tuple(steps))

    assert judged(plain(part(3)), whole=plain(part(0))).verdict == Verdict.SAME_BITS


def test_other_samples_are_another_order() -> None:
    resumed = part(3)
    other = replace(resumed.steps[0], samples=(("s0",),))
    found = judged(replace(resumed, only=(other, *resumed.steps[1:])))
    assert [(f.cause, f.step) for f in found.findings] == [(resume_causes.ORDER_NOT_RESTORED, 3)]
    assert any("with other samples" in sentence for sentence in found.unseen)


def test_batches_that_are_only_skipped_are_no_other_order() -> None:
    """A script may run through its loader, without training, to where it stopped."""
    resumed = part(3)
    first = replace(
        resumed.steps[0],
        samples=(("s1", "s2", "s3"),),
        contents=(("look-1", "look-2", "look-3"),),
    )
    found = judged(replace(resumed, only=(first, *resumed.steps[1:])))
    assert (found.verdict, found.cases[0].begins_at) == (Verdict.SAME_BITS, 3)


def test_samples_that_look_otherwise_are_other_random_numbers() -> None:
    def looking(trace: Trace, how: str) -> Trace:
        steps = (replace(step, contents=((how,),)) for step in trace.steps)
        return replace(trace, only=tuple(steps))

    found = judged(looking(part(3), "b"), whole=looking(part(0), "a"))
    assert causes_of(found) == ["random-not-restored"]


def with_events(first: int, make: Callable[[int], Sequence[Event]], **changes: object) -> Trace:
    """Make a launch of one worker with more events in each step, which is given by its number."""
    steps = events_of(first, STEPS, **changes)
    return launch([[*make(n), *events] for n, events in enumerate(steps, first)])


@pytest.mark.parametrize("by", ["dropout", "step"])
def test_random_numbers_of_a_step_count_whatever_the_gradients_say(by: str) -> None:
    whole = with_events(0, lambda n: [Drew(by, f"d{n}")])
    assert causes_of(judged(with_events(3, lambda n: [Drew(by, f"d{n}")]), whole=whole)) == []
    found = judged(with_events(3, lambda n: [Drew(by, f"d{n - 3}")]), whole=whole)
    assert [(f.cause, f.step) for f in found.findings] == [(resume_causes.RANDOM_NOT_RESTORED, 3)]
    unknown = judged(
        with_events(3, lambda n: [Drew(by, f"d{n}")], gradients=weights(0.6)), whole=whole
    )
    assert causes_of(unknown) == ["unknown"]


def of_two(first: int, losses: Callable[[int, int], float], *drawn: Drew) -> Trace:
    """Make a launch of two workers, with losses by rank and step, and draws by rank."""
    ranks = []
    for rank in (0, 1):
        events: list[Event] = []
        for number, (batch, backward, step) in enumerate(events_of(first, STEPS), first):
            assert isinstance(backward, Backward)
            own = replace(backward, loss=losses(rank, number))
            events += [*drawn[rank : rank + 1], batch_with(batch, samples=()), own, step]
        ranks.append([begun(0, 0), *events])
    return trace_of(ranks)


def test_a_random_state_of_one_rank_for_all() -> None:
    def apart(rank: int, number: int) -> float:
        return 1.0 + rank + number

    whole = of_two(0, apart, Drew("dropout", "a"), Drew("dropout", "b"))
    assert judged(of_two(3, apart, Drew("dropout", "a"), Drew("dropout", "b")), whole=whole).is_good
    same_draws = of_two(3, apart, Drew("dropout", "a"), Drew("dropout", "a"))
    assert causes_of(judged(same_draws, whole=whole)) == ["random-of-one-rank"]
    same_losses = of_two(3, lambda _, n: apart(0, n), Drew("dropout", "a"), Drew("dropout", "b"))
    assert causes_of(judged(same_losses, whole=whole)) == ["random-of-one-rank"]
    anew = of_two(3, apart, Drew("dropout", "c"), Drew("dropout", "c"))
    assert causes_of(judged(anew, whole=whole)) == ["random-not-restored"]


def test_on_another_number_of_workers_only_what_they_share_is_compared() -> None:
    whole = of_two(0, lambda rank, n: 1.0 + rank, Drew("dropout", "a"), Drew("dropout", "b"))
    own = Wrote("rank1.pt", "train.py:3", False)
    killed = replace(whole, only=whole.steps[:4], ranks=(whole.ranks[0], (*whole.ranks[1], own)))
    steps = events_of(3, STEPS)
    alone = launch([[batch_with(b, samples=()), e, s] for b, e, s in steps])
    found = judged(alone, whole=whole, killed=killed)
    assert found.findings == ()
    assert "random states and rank1.pt" in found.unseen[-1]
    assert "resumed on 1" in resume_report(found).as_text()


def test_keys_that_are_ignored() -> None:
    loaded = Loaded(("w",), ("module.w",), "train.py:5")

    def after(trace: Trace) -> Trace:
        return replace(trace, ranks=((loaded, *trace.ranks[0]),))

    for first in (after(part(0)), after(part(3, before=weights(weight_after(3) + 1e-3)))):
        found = judged(first)
        assert causes_of(found) == ["keys-ignored"]
        assert found.findings[0].lines[0] == "train.py:5"
    # A part that the script means to leave out is left out in both.
    both = judged(after(part(3, before=weights(weight_after(3) + 1e-3))), whole=after(part(0)))
    assert causes_of(both) == ["weights-not-restored"]


@pytest.mark.parametrize(
    ("again", "cause"), [(True, "enumerate-restarts"), (False, "schedule-not-restored")]
)
def test_rates_that_begin_with_the_epochs_again(again: bool, cause: str) -> None:
    def of_epochs(trace: Trace, first: int) -> Trace:
        """Give it epochs of three steps."""
        steps = (
            replace(s, drawn=((replace(s.drawn[0][0], number=n // 3),),))
            for n, s in enumerate(trace.steps, first)
        )
        return replace(trace, only=tuple(steps))

    resumed = of_epochs(part(4), 4)
    rates = (0.1 / 4, 0.1 / 5) if again else (0.1, 0.1 / 2)
    steps = (
        replace(s, stepped=(replace(s.stepped[0], rates=(rate,)),))
        for s, rate in zip(resumed.steps, rates, strict=True)
    )
    found = judged(replace(resumed, only=tuple(steps)), whole=of_epochs(part(0), 0))
    assert causes_of(found) == [cause]


def test_a_loss_scale_that_begins_anew() -> None:
    def scaled(first: int, scales: Sequence[float]) -> Trace:
        steps = zip(events_of(first, STEPS), scales, strict=True)
        return launch([[*events, Scaled(scale)] for events, scale in steps])

    whole = scaled(0, [64.0, 64.0, 32.0, 32.0, 16.0, 16.0])
    (finding,) = judged(scaled(3, [64.0, 64.0, 64.0]), whole=whole).findings
    assert (finding.cause, finding.what) == (
        resume_causes.SCALE_NOT_RESTORED,
        "its loss scale is 64 instead of 32",
    )


def test_what_is_kept_beside_the_weights() -> None:
    def telling(first: int, text: str, average: str = "a") -> Trace:
        def more(number: int) -> list[Event]:
            return [Evaluated({}, ("w", f"{average}{number}")), Printed(text.format(number / 8))]

        return with_events(first, more)

    line = "epoch 1: loss {:.3f} (best 0.250)"
    whole = telling(0, line)
    assert judged(telling(3, line), whole=whole).findings == ()
    # A figure may be a mean since the start: only a note.
    other = judged(telling(3, "epoch 1: loss 0.111 (best 0.250)"), whole=whole)
    assert (causes_of(other), other.is_good) == (["figure-differs"], True)
    best = judged(telling(3, line.replace("0.250", "0.375")), whole=whole)
    assert (causes_of(best), best.is_good) == (["not-saved"], False)
    average = judged(telling(3, line, "b"), whole=whole)
    assert causes_of(average) == ["not-saved"]


def test_beginning_anew_is_a_fault_where_something_was_saved() -> None:
    found = judged(part(0))
    assert causes_of(found) == ["not-resumed"]
    assert "though it had written last.pt" in found.findings[0].what
    nothing = judged(part(0), saved=())
    assert (nothing.verdict, nothing.findings) == (Verdict.NOTHING, ())
    assert "nothing was written in 4 steps" in nothing.unseen[0]


def test_a_command_that_doesnt_do_the_same_twice_says_nothing_of_resuming() -> None:
    killed = part(0, last=4, gradients=weights(0.7))
    found = judged(part(3), killed=killed)
    assert found.verdict == Verdict.NOTHING
    assert causes_of(found) == ["not-repeatable"]
    assert resume_report(found).as_text().startswith("nothing to compare: not-repeatable")


def test_a_launch_that_fails_or_takes_no_step() -> None:
    failed = judged(replace(part(3, last=3), failure="FileNotFoundError: last.pt"))
    assert (failed.verdict, failed.is_good) == (Verdict.FAILED, False)
    assert (
        resume_report(failed)
        .as_text()
        .startswith("failed when it was resumed: killed after 4 steps")
    )
    over = judged(trace_of([[FileRead("last.pt", "train.py:3"), begun(0, 0)]]))
    assert over.verdict == Verdict.NOTHING
    assert "it has read last.pt" in over.unseen[0]
    assert "took no step" in over.unseen[0]


@pytest.mark.parametrize(("steps", "least", "most"), [(2, 1, 1), (3, 2, 2), (69, 24, 46)])
def test_it_is_killed_in_the_second_epoch_of_three(steps: int, least: int, most: int) -> None:
    whole = part(0, last=steps)
    assert [choose_step(whole, chance) for chance in (0.0, 0.999999)] == [least, most]


@pytest.mark.parametrize(
    ("kill_at", "again"), [(5, 2), (7, 3), (8, 4), (9, 2), (10, 2), (11, 3), (15, 1)]
)
def test_it_is_killed_again_in_the_same_epoch_or_behind_it(kill_at: int, again: int) -> None:
    """Epochs have 5 steps, and what was saved before the last step is gone on with."""
    steps = events_of(0, 16)
    events: list[Event] = []
    for number, (batch, *others) in enumerate(steps):
        if number % 5 == 0:
            events.append(begun(0, number // 5))
        events += [batch_with(batch, number=number // 5), *others]
    assert choose_again(trace_of([events]), kill_at) == again


# Whole commands.

SCRIPT = """
import os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

forgets = sys.argv[1:]
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
kept = {"model": model, "optimizer": optimizer, "schedule": schedule}
first = 0
if os.path.exists("kept/last.pt"):
    found = torch.load("kept/last.pt")
    first = found["epoch"]
    for name in [name for name in kept if name not in forgets]:
        kept[name].load_state_dict(found[name])
    if "random" not in forgets:
        torch.set_rng_state(found["random"])
os.makedirs("kept", exist_ok=True)
for epoch in range(first, 4):
    for inputs, targets in DataLoader(data, batch_size=8, shuffle=True):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()
    state = {name: each.state_dict() for name, each in kept.items()}
    torch.save(state | {"epoch": epoch + 1, "random": torch.get_rng_state()}, "kept/last.pt")
"""
GROUP = pytest.mark.xdist_group("verify")


@pytest.mark.ranks
@pytest.mark.slow
@GROUP
@pytest.mark.parametrize(
    ("forgets", "causes"),
    [
        ("", []),
        ("optimizer", ["optimizer-not-restored", "schedule-not-restored"]),
        ("random", ["order-not-restored"]),
    ],
)
def test_a_script_by_its_own_checkpoints(
    forgets: str, causes: list[str], verify: Verify, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    page = tmp_path / "page.html"
    options = ("--resume", "--kill-at-step", "15", "--html", str(page))
    done = verify("train.py", *options, "--", *forgets.split())
    assert (done.code, done.causes) == (65 if causes else 0, causes), done.out + done.err
    assert done.content["killed_after"] == ([15] if causes else [15, 18])
    assert done.content["resumed_after"] == ([12] if causes else [12, 12])
    # Nothing of it is kept.
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "page.html"}
    assert str(done.content["verdict"]) in page.read_text()
    if "optimizer" in forgets:
        assert done.content["first_differences"] == [
            {"launch": "resumed", "step": 13, "in": ["weights"]}
        ]
        assert "train.py:11: optimizer = torch.optim.Adam" in done.words


@pytest.mark.ranks
@pytest.mark.slow
@GROUP
def test_a_launching_command_with_arguments_for_resuming(verify: Verify, tmp_path: Path) -> None:
    """Two workers by torchrun; the script resumes where it is told to."""
    told = SCRIPT.replace('os.path.exists("kept/last.pt")', '"--go-on" in forgets')
    wrapped = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
"""
    parted = told.replace("optimizer = torch", f"{wrapped}optimizer = torch", 1)
    (tmp_path / "train.py").write_text(
        parted.replace(
            "    torch.save", "    dist.barrier()\n    if dist.get_rank() == 0: torch.save"
        )
        .replace("for epoch in", "dist.barrier()\nfor epoch in")
        .replace("    schedule.step()\n", "    schedule.step()\n    dist.barrier()\n")
        + "dist.destroy_process_group()\n"
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    own = ("--resume", "--kill-at-step", "15", "--resume-args", "--go-on now")
    done = verify(*own, "--", *torchrun, "train.py")
    assert done.code == 0, done.out + done.err
    assert done.content["resumed_after"] == [12, 12]
    assert all(row["workers"] == 2 for row in entries(done.content, "compared"))


@pytest.mark.ranks
@pytest.mark.slow
@GROUP
@pytest.mark.parametrize("more", [(), ("--shards", "4", "--resume-workers", "3")])
def test_a_recipe_by_its_snapshots_in_mid_epoch(more: Sequence[str], verify: Verify) -> None:
    own = ("--resume", "--kill-at-step", "30", "--workers", "2", "--snapshot-every-steps", "4")
    done = verify("digits", *own, *more)
    assert done.code == 0, done.out + done.err
    resumed_after = done.content["resumed_after"]
    assert isinstance(resumed_after, list)
    # The newest that was written by then.
    assert len(resumed_after) == 2
    assert {*resumed_after} < {*range(4, 70, 4), 23, 46}
    assert "bit for bit" in done.out


SESSION = """
import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, random_split

import paceline

mode = sys.argv[1]


class Noisy(Dataset):
    def __init__(self):
        self.own = np.random.default_rng(0)

    def __len__(self):
        return 96

    def __getitem__(self, index):
        noise = self.own.normal() if mode == "data" else 0.0
        return x[index] + noise, x[index].sum()


with paceline.session() as s:
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    net = s.model(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = optimizer if mode == "optimizer" else s.optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedule = schedule if mode == "schedule" else s.scheduler(schedule)
    data = Noisy()
    if mode == "split":
        generator = torch.Generator()
        generator.seed()
        data, _ = random_split(data, [64, 32], generator=generator)
    batches = s.loader(data, global_batch=8)
    for epoch in s.epochs(3):
        for inputs, targets in batches:
            s.backward((net(inputs)[:, 0] - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
"""


@pytest.mark.ranks
@pytest.mark.slow
@GROUP
@pytest.mark.parametrize(
    ("mode", "cause"),
    [
        ("optimizer", "optimizer-not-restored"),
        ("schedule", "schedule-not-restored"),
        ("data", "random-not-restored"),
        ("split", "not-repeatable"),
    ],
)
def test_what_no_snapshot_of_a_session_holds(
    mode: str, cause: str, verify: Verify, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SESSION)
    done = verify("train.py", "--resume", "--kill-at-step", "15", "--", mode)
    assert (done.code, cause) == (65, done.causes[0]), done.out + done.err
