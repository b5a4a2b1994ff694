"""A training that is killed and resumed, held against one that nobody disturbed."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.verify import causes as known
from paceline.verify import resume_causes
from paceline.verify.causes import Cause
from paceline.verify.compare import LEAST, given_limits
from paceline.verify.events import Drew, Scaled, Stepped
from paceline.verify.resume import Launches, ResumeResult, choose_step, compare_resumed
from paceline.verify.resume_report import resume_json, resume_text
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


def part(first: int, *, last: int = STEPS, **changes: object) -> Trace:
    """Make a launch that takes steps `first` to before `last`; changes are of its first step."""
    events = []
    for number in range(first, last):
        event = trained([f"s{number}"], 1.0, 0.5, weight_after(number + 1))
        is_first = number == first
        begun_with = {"before": weights(weight_after(number)), "state_before": f"state-{number}"}
        own = replace(
            stepped(0.5, weight_after(number + 1), rate=0.1 / (1 + number)),
            state=f"state-{number + 1}",
            **({**begun_with, **changes} if is_first else {}),  # type: ignore[arg-type]
        )
        events.append([*event[:-1], own])
    return launch(events)


def judged(
    resumed: Trace, *, killed: Trace | None = None, saved: Sequence[str] = ("last.pt",)
) -> ResumeResult:
    launches = Launches(
        whole=part(0),
        killed=part(0, last=4) if killed is None else killed,
        resumed=resumed,
        kill_at=4,
        saved=tuple(saved),
        cut_at=50,
    )
    return compare_resumed(launches, given_limits(LEAST))


@pytest.mark.parametrize("begins_at", [1, 3, 4])
def test_the_step_that_it_goes_on_after_is_found_by_the_weights(begins_at: int) -> None:
    found = judged(part(begins_at))
    assert (found.verdict, found.begins_at, found.findings) == (Verdict.SAME_BITS, begins_at, ())
    text = resume_text(found)
    assert text.startswith(
        f"the same training when it is killed after 4 steps, resumed after {begins_at}: bit for bit"
    )
    assert f"resumed      {begins_at + 1} to 6" in text
    assert resume_json(found)["resumed_after"] == begins_at


@pytest.mark.parametrize(
    ("changes", "causes"),
    [
        ({"rates": (0.1,)}, [resume_causes.SCHEDULE_NOT_RESTORED]),
        ({"state_before": ""}, [resume_causes.OPTIMIZER_NOT_RESTORED]),
        ({"before": weights(weight_after(3) + 1e-3)}, [resume_causes.WEIGHTS_NOT_RESTORED]),
        (
            {"rates": (0.1,), "state_before": "state-0"},
            [resume_causes.OPTIMIZER_NOT_RESTORED, resume_causes.SCHEDULE_NOT_RESTORED],
        ),
        ({"gradients": weights(0.6)}, [known.UNKNOWN]),
    ],
)
def test_what_isnt_restored_is_named(changes: dict[str, object], causes: list[Cause]) -> None:
    found = judged(part(3, **changes))  # type: ignore[arg-type]
    assert [finding.cause for finding in found.findings] == causes
    assert (found.verdict, found.begins_at, found.is_good) == (Verdict.DIFFERENT, 3, False)
    assert all(finding.step == 3 for finding in found.findings)
    number = f"{len(causes)} cause{'s' if len(causes) > 1 else ''}"
    assert resume_text(found).startswith(f"different: {number}: {causes[0]}")


@pytest.mark.parametrize("state", ["state-1", ""])
def test_each_of_several_optimizers_has_to_be_restored(state: str) -> None:
    optimizers = (1, 0, 0, 0, 1, 0)

    def of(trace: Trace, first: int) -> Trace:
        owners = optimizers[first:]
        steps = (
            replace(step, stepped=(replace(step.stepped[0], optimizer=owner),))
            for step, owner in zip(trace.steps, owners, strict=False)
        )
        return replace(trace, only=tuple(steps))

    resumed = of(part(3), 3)
    first, second, third = resumed.steps
    begun = replace(second, stepped=(replace(second.stepped[0], state_before=state),))
    launches = Launches(
        whole=of(part(0), 0),
        killed=of(part(0, last=4), 0),
        resumed=replace(resumed, only=(first, begun, third)),
        kill_at=4,
        saved=("last.pt",),
        cut_at=50,
    )
    found = compare_resumed(launches, given_limits(LEAST))
    causes = [] if state else [(resume_causes.OPTIMIZER_NOT_RESTORED, 4)]
    assert [(finding.cause, finding.step) for finding in found.findings] == causes


def test_an_optimizer_without_a_state_has_none_to_restore() -> None:
    def plain(trace: Trace) -> Trace:
        def without(step: Stepped) -> Stepped:
            return replace(step, state="", state_before="")

        steps = (replace(s, stepped=tuple(map(without, s.stepped))) for s in trace.steps)
        return replace(trace, only=tuple(steps))

    launches = Launches(
        whole=plain(part(0)),
        killed=plain(part(0, last=4)),
        resumed=plain(part(3)),
        kill_at=4,
        saved=("last.pt",),
        cut_at=50,
    )
    assert compare_resumed(launches, given_limits(LEAST)).verdict == Verdict.SAME_BITS


def test_other_samples_are_another_order() -> None:
    resumed = part(3)
    other = replace(resumed.steps[0], samples=(("s0",),))
    found = judged(replace(resumed, only=(other, *resumed.steps[1:])))
    assert [finding.cause for finding in found.findings] == [resume_causes.ORDER_NOT_RESTORED]
    assert "it trains on other samples from step 3 on" in found.findings[0].what
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
    assert (found.verdict, found.begins_at) == (Verdict.SAME_BITS, 3)


def test_samples_that_look_otherwise_are_other_random_numbers() -> None:
    def looking(trace: Trace, how: str) -> Trace:
        steps = (replace(step, contents=((how,),)) for step in trace.steps)
        return replace(trace, only=tuple(steps))

    whole, killed = looking(part(0), "a"), looking(part(0, last=4), "a")
    launches = Launches(
        whole=whole,
        killed=killed,
        resumed=looking(part(3), "b"),
        kill_at=4,
        saved=("last.pt",),
        cut_at=50,
    )
    found = compare_resumed(launches, given_limits(LEAST))
    assert [finding.cause for finding in found.findings] == [resume_causes.RANDOM_NOT_RESTORED]


@pytest.mark.parametrize(("state", "cause"), [("d0", "random-not-restored"), ("d3", "unknown")])
def test_draws_in_a_step_are_told_from_what_nobody_knows(state: str, cause: str) -> None:
    def drawing(trace: Trace, states: Sequence[str]) -> Trace:
        return replace(trace, ranks=((*trace.ranks[0], *(Drew("step", s) for s in states)),))

    states = [f"d{number}" for number in range(STEPS)]
    launches = Launches(
        whole=drawing(part(0), states),
        killed=drawing(part(0, last=4), states[:4]),
        resumed=drawing(part(3, gradients=weights(0.6)), [state]),
        kill_at=4,
        saved=("last.pt",),
        cut_at=50,
    )
    found = compare_resumed(launches, given_limits(LEAST))
    assert [str(finding.cause) for finding in found.findings] == [cause]


def test_a_loss_scale_that_begins_anew() -> None:
    def scaled(trace: Trace, scales: Sequence[float]) -> Trace:
        return replace(trace, ranks=((*trace.ranks[0], *map(Scaled, scales)),))

    launches = Launches(
        whole=scaled(part(0), [64.0, 64.0, 32.0, 32.0, 16.0, 16.0]),
        killed=scaled(part(0, last=4), [64.0, 64.0, 32.0, 32.0]),
        resumed=scaled(part(3), [64.0, 64.0, 64.0]),
        kill_at=4,
        saved=("last.pt",),
        cut_at=50,
    )
    (finding,) = compare_resumed(launches, given_limits(LEAST)).findings
    assert (finding.cause, finding.what) == (
        resume_causes.SCALE_NOT_RESTORED,
        "its loss scale is 64 instead of 32",
    )


def test_beginning_anew_is_a_fault_where_something_was_saved() -> None:
    found = judged(part(0))
    assert [finding.cause for finding in found.findings] == [resume_causes.NOT_RESUMED]
    assert "though it had written last.pt" in found.findings[0].what
    nothing = judged(part(0), saved=())
    assert (nothing.verdict, nothing.findings) == (Verdict.NOTHING, ())
    assert "nothing was written in 4 steps" in nothing.unseen[0]


def test_a_command_that_doesnt_do_the_same_twice_says_nothing_of_resuming() -> None:
    killed = part(0, last=4, gradients=weights(0.7))
    found = judged(part(3), killed=killed)
    assert found.verdict == Verdict.NOTHING
    assert [finding.cause for finding in found.findings] == [resume_causes.NOT_REPEATABLE]
    assert resume_text(found).startswith("nothing to compare: not-repeatable")


def test_a_launch_that_fails_or_takes_no_step() -> None:
    failed = judged(replace(part(3, last=3), failure="FileNotFoundError: last.pt"))
    assert (failed.verdict, failed.is_good) == (Verdict.FAILED, False)
    assert resume_text(failed).startswith("failed when it was resumed: killed after 4 steps")
    over = judged(trace_of([[begun(0, 0)]]))
    assert over.verdict == Verdict.NOTHING
    assert "took no step" in over.unseen[0]


@pytest.mark.parametrize(("steps", "least", "most"), [(2, 1, 1), (3, 2, 2), (69, 24, 46)])
def test_it_is_killed_in_the_second_epoch_of_three(steps: int, least: int, most: int) -> None:
    whole = part(0, last=steps)
    assert [choose_step(whole, chance) for chance in (0.0, 0.999999)] == [least, most]


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
    assert (done.content["killed_after"], done.content["resumed_after"]) == (15, 12)
    # Nothing of it is kept.
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "page.html"}
    assert str(done.content["verdict"]) in page.read_text()
    if "optimizer" in forgets:
        assert done.content["first_differences"] == [
            {"launch": "resumed", "step": 12, "in": ["weights"]}
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
    assert (done.content["workers"], done.content["resumed_after"]) == (2, 12)


@pytest.mark.ranks
@pytest.mark.slow
@GROUP
def test_a_recipe_by_its_snapshots_in_mid_epoch(verify: Verify) -> None:
    own = ("--resume", "--kill-at-step", "30", "--workers", "2", "--snapshot-every-steps", "4")
    done = verify("digits", *own)
    assert done.code == 0, done.out + done.err
    begins_at = done.content["resumed_after"]
    assert begins_at in (4, 8, 12, 16, 20, 23, 24, 28)  # the newest that was written by then
    assert "resumed after" in done.out
    assert "bit for bit" in done.out
