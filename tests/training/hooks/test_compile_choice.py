"""`--compile auto`, by a clock that only the model moves on."""

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.options.fields import OptionValue
from paceline.training import components, step_times
from paceline.training.components import CompileSwitch
from paceline.training.job import Job
from paceline.training.sync.validation import check_reproducible
from tests.support.ranks import run_ranks
from tests.support.trainings import SIDE, Outcome, StopAt, configure, pictures, run_training_on

PLAIN_S = 20.0
STEPS = 3 * 20
TRIED = "compiles the model, for the last 17 min 40 s"
COMPILED = "compiled, since a step takes 10 s compiled, 20 s as it is"


class CompilerError(Exception):
    """Stands for one of torch's."""

    __module__ = "torch._dynamo.exc"


class Timed(nn.Module):
    """Moves a clock on in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE * SIDE, 3)
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(inputs, PLAIN_S)

    def run(self, inputs: Tensor, pass_s: float) -> Tensor:
        self.now_s += pass_s
        scores: Tensor = self.layer(inputs.flatten(1))
        return scores


def timed_job(compiled_s: float, fails_on: int | None = None, passes: int = 0) -> Job:
    """Give a job whose compiled model takes this long, but fails on a rank after some passes."""
    model = Timed()
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    done = count()

    def compiled(inputs: Tensor) -> Tensor:
        assert torch.is_grad_enabled()  # no evaluation
        if rank == fails_on and next(done) >= passes:
            raise CompilerError("no such operation\nand more")
        return model.run(inputs, compiled_s)

    # This process is forked: what is changed ends with it.
    components.compile_forward = lambda module, *, in_buckets=False: compiled
    step_times.perf_counter = model.clock  # type: ignore[attr-defined]
    return Job(model=model, train=pictures(160), validation=pictures(5, seed=2))


def trained(
    workers: int,
    directory: Path,
    make_job: Callable[[], Job],
    stop: StopAt | None = None,
    epochs: int = 3,
    **more: OptionValue,
) -> tuple[list[str], int]:
    """Train; what was said of compiling, and the last step."""
    settings = configure(epochs=epochs, compile="auto", **more)
    outcomes: list[Outcome] = run_ranks(
        workers, run_training_on, directory, make_job, settings, stop
    )
    start = "--compile auto: "
    said = [[line for line in each.lines if line.startswith(start)] for each in outcomes]
    assert not any(said[1:])
    return [line.removeprefix(start) for line in said[0]], outcomes[0].step


@pytest.mark.parametrize(
    ("workers", "compiled_s", "fails_on", "came_to"),
    [
        (1, 10.0, None, COMPILED),
        (1, 19.9, None, f"not {COMPILED}".replace("10 s", "19.9 s")),
        (2, 10.0, 1, "not compiled, since that failed on rank 1: CompilerError: no such operation"),
        (2, 10.0, 0, "not compiled, since that failed on rank 0: CompilerError: no such operation"),
    ],
)
@pytest.mark.ranks
def test_what_is_faster_is_kept(
    workers: int, compiled_s: float, fails_on: int | None, came_to: str, tmp_path: Path
) -> None:
    said, steps = trained(workers, tmp_path, partial(timed_job, compiled_s, fails_on))
    assert said == [TRIED, came_to]
    assert steps == STEPS


@pytest.mark.ranks
def test_it_waits_for_what_sync_auto_measures(tmp_path: Path) -> None:
    settings = configure(epochs=6, compile="auto", sync="auto")
    first, _ = run_ranks(2, run_training_on, tmp_path, partial(timed_job, 10.0), settings, None)
    said = [line.partition(" auto: ") for line in first.lines if " auto: " in line]
    assert [option for option, _, _ in said] == ["--sync", "--compile", "--compile"]
    assert said[2][2] == COMPILED


@pytest.mark.ranks
def test_where_little_is_left_nothing_is_compiled(tmp_path: Path) -> None:
    said, _ = trained(1, tmp_path, partial(timed_job, 10.0), epochs=1)
    assert said == ["not compiled, since with 4 min 20 s left it wouldn't pay"]


@pytest.mark.ranks
def test_a_shape_that_cannot_be_compiled_later_on_is_told_of(tmp_path: Path) -> None:
    settings = configure(epochs=3, compile="auto")
    make_job = partial(timed_job, 10.0, fails_on=1, passes=20)
    first, second = run_ranks(2, run_training_on, tmp_path, make_job, settings, None)
    told = "--compile auto: rank 1 goes on with what isn't compiled: CompilerError"
    assert [line.startswith(told) for line in second.lines] == [True]
    assert f"--compile auto: {COMPILED}" in first.lines
    assert first.step == STEPS


@pytest.mark.ranks
def test_epochs_of_one_step_are_measured_as_well(tmp_path: Path) -> None:
    make_job = partial(timed_job, 10.0)
    said, _ = trained(1, tmp_path, make_job, epochs=60, global_batch=160)
    assert said[0].startswith("compiles the model, for the last ")
    assert said[1].startswith("compiled, since a step takes ")


@pytest.mark.ranks
def test_a_forward_pass_that_is_collective_is_left_alone(tmp_path: Path) -> None:
    make_job = partial(timed_job, 10.0)
    said, steps = trained(2, tmp_path, make_job, epochs=1, sync_batchnorm=True)
    assert (said, steps) == ([], STEPS // 3)


@pytest.mark.ranks
def test_a_resumed_training_keeps_what_was_chosen(tmp_path: Path) -> None:
    make_job = partial(timed_job, 10.0)
    said, step = trained(2, tmp_path, make_job, StopAt(rank=1, forward=25))
    assert said == [TRIED, COMPILED]
    assert step < STEPS
    said, step = trained(1, tmp_path, make_job)
    assert said == []  # it measured nothing again
    assert step == STEPS


@pytest.mark.ranks
def test_what_a_training_did_not_survive_is_not_tried_again(tmp_path: Path) -> None:
    make_job = partial(timed_job, 10.0)
    said, _ = trained(1, tmp_path, make_job, StopAt(rank=0, forward=9))
    assert said == [TRIED]
    run = {"format": 1, "derived": {"compile": "auto: compiles the model"}}
    (tmp_path / "run.json").write_text(json.dumps(run))  # as the first start has left it
    said, step = trained(1, tmp_path, make_job)
    assert said == []
    assert step == STEPS


def test_where_compiling_fails_a_pass_is_computed_as_it_is() -> None:
    switch = CompileSwitch()

    def fail(error: Exception) -> object:
        raise error

    def state() -> tuple[bool, str | None]:
        return switch.is_on, switch.problem

    run = switch.between(lambda error: "plain", fail)
    assert run(CompilerError()) == "plain"
    assert state() == (False, None)
    switch.is_on = True
    with pytest.raises(ZeroDivisionError):  # the model's own
        run(ZeroDivisionError())
    with torch.no_grad():
        assert run(CompilerError()) == "plain"
    assert state() == (True, None)
    assert run(CompilerError("no compiler")) == "plain"
    assert state() == (False, "CompilerError: no compiler")


def test_the_same_bits_do_not_follow_the_clock() -> None:
    with pytest.raises(UsageError, match="--shards can't be combined with --compile auto"):
        check_reproducible(configure(shards=2, compile="auto"), 2)
    with pytest.raises(UsageError, match="--deterministic can't be combined with --compile auto"):
        configure(deterministic=True, compile="auto")
    with pytest.raises(UsageError, match=r"--deterministic can't be .* --cudnn-benchmark"):
        configure(deterministic=True, cudnn_benchmark=True)
