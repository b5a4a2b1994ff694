import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Subset, get_worker_info

from paceline.data.batch import Batch
from paceline.data.loading.loader import LoaderSource
from paceline.data.order import EpochPlan, epoch_order
from paceline.errors import DataError, InfrastructureError, UsageError
from tests.launch.waiting import until

WORKERS = [0, 1, 3]


class Noisy:
    """Items that hold their index and random numbers; counts what is read of it."""

    def __init__(self, num: int = 23, log: Path | None = None) -> None:
        self.num = num
        self.log = log

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{index}\n")
        return torch.tensor([index, random.random(), float(torch.rand(()))]), index % 7


class Levelled(Noisy):
    """Items are what an attribute of an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = SimpleNamespace(level=0.0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor(self.transform.level), index


def pids() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


class Doing(Noisy):
    """Does something at one sample."""

    def __init__(self, action: Callable[[], object], at: int = 9) -> None:
        super().__init__()
        self.action = action
        self.at = at

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.at:
            self.action()
        return super().__getitem__(index)


def plan(part: int = 0, parts: int = 1, epoch: int = 0, first_step: int = 0) -> EpochPlan:
    return EpochPlan(
        seed=1, epoch=epoch, global_batch=5, part=part, parts=parts, first_step=first_step
    )


@contextmanager
def source_of(dataset: Noisy, loader_workers: int, timeout_s: float = 60) -> Iterator[LoaderSource]:
    with closing(
        LoaderSource(dataset, loader_workers=loader_workers, timeout_s=timeout_s)
    ) as source:
        yield source


def inputs_of(batches: list[Batch]) -> torch.Tensor:
    return torch.cat([batch.inputs[: batch.local] for batch in batches])


@pytest.mark.parametrize("loader_workers", WORKERS)
def test_batches_do_not_depend_on_loader_processes(loader_workers: int) -> None:
    with source_of(Noisy(), loader_workers) as source, source_of(Noisy(), 0) as plain:
        for epoch in range(2):
            order = epoch_order(23, 1, epoch)
            batches = list(source.train_batches(plan(epoch=epoch)))
            assert [batch.local for batch in batches] == [5, 5, 5, 5, 3]
            assert inputs_of(batches)[:, 0].tolist() == order.tolist()
            assert [i for batch in batches for i in batch.indices.tolist()] == order.tolist()
            assert torch.cat([batch.targets for batch in batches]).tolist() == (order % 7).tolist()
            expected = inputs_of(list(plain.train_batches(plan(epoch=epoch))))
            assert torch.equal(inputs_of(batches), expected)


def test_the_next_epoch_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    log = tmp_path / "read"
    with source_of(Noisy(log=log), 2) as source, source_of(Noisy(), 0) as plain:
        wanted = [inputs_of(list(plain.train_batches(plan(epoch=epoch)))) for epoch in range(4)]
        assert torch.equal(inputs_of(list(source.train_batches(plan()))), wanted[0])
        source.read_ahead(plan(epoch=1))
        until(lambda: len(log.read_text().splitlines()) >= 23 + 4 * 5)  # as is kept ready
        assert torch.equal(inputs_of(list(source.train_batches(plan(epoch=1)))), wanted[1])
        source.read_ahead(plan(epoch=2))
        # Another epoch than was expected, and one after an evaluation by the same source.
        assert torch.equal(inputs_of(list(source.train_batches(plan(epoch=3)))), wanted[3])
        source.read_ahead(plan(epoch=2))
        assert len(list(source.eval_batches(0, 1, 10))) == 3
        assert torch.equal(inputs_of(list(source.train_batches(plan(epoch=2)))), wanted[2])


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_workers_see_the_same_samples_as_one(parts: int) -> None:
    with source_of(Noisy(), 0) as plain:
        alone = list(plain.train_batches(plan()))
        each = [list(plain.train_batches(plan(part, parts))) for part in range(parts)]
    for step, shares in enumerate(zip(*each, strict=True)):
        assert torch.equal(inputs_of(list(shares)), alone[step].inputs)
        assert {batch.total for batch in shares} == {alone[step].local}


def test_an_empty_share_gets_a_stand_in() -> None:
    with source_of(Noisy(), 0) as source:
        *_, last = source.train_batches(plan(part=3, parts=4))
    assert (last.local, last.total, len(last.indices)) == (0, 3, 0)
    assert last.inputs[:, 0].tolist() == [epoch_order(23, 1, 0)[20]]


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_resuming_reads_no_earlier_samples(loader_workers: int, tmp_path: Path) -> None:
    log = tmp_path / "read"
    with source_of(Noisy(log=log), loader_workers) as source:
        rest = list(source.train_batches(plan(first_step=3)))
    expected = epoch_order(23, 1, 0)[15:].tolist()
    assert inputs_of(rest)[:, 0].tolist() == expected
    assert sorted(map(int, log.read_text().split())) == sorted(expected)
    with source_of(Noisy(), 0) as whole:  # random numbers and all
        assert torch.equal(inputs_of(rest), inputs_of(list(whole.train_batches(plan())))[15:])


@pytest.mark.parametrize("loader_workers", WORKERS)
@pytest.mark.parametrize("parts", [1, 3, 30])
@pytest.mark.core_cases(4)
def test_evaluation_sees_every_sample_once(loader_workers: int, parts: int) -> None:
    with source_of(Noisy(), loader_workers) as source:
        batches = [b for part in range(parts) for b in source.eval_batches(part, parts, 4)]
    assert inputs_of(batches)[:, 0].tolist() == list(range(23))
    assert all(batch.local == batch.total == len(batch.inputs) for batch in batches)


def test_processes_are_kept_and_ended() -> None:
    before = set(multiprocessing.active_children())
    with source_of(Noisy(), 2) as source:
        list(source.train_batches(plan()))
        started = set(multiprocessing.active_children()) - before
        list(source.eval_batches(0, 1, 8))
        list(source.train_batches(plan(epoch=1)))
        assert set(multiprocessing.active_children()) - before == started
        assert len(started) == 2
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_what_a_script_changes_of_its_data_set_between_epochs_is_read(loader_workers: int) -> None:
    """As with a DataLoader that starts its processes anew for each epoch, PyTorch's default."""
    data = Levelled()
    wrapped: Subset[object] = Subset(data, range(20))  # type: ignore[arg-type]  # it is map-style
    with closing(LoaderSource(wrapped, loader_workers=loader_workers)) as source:
        seen = []
        for epoch in range(3):
            data.transform.level = float(epoch)
            batches = list(source.train_batches(plan(epoch=epoch)))
            source.read_ahead(plan(epoch=epoch + 1))
            seen.append({float(level) for batch in batches for level in batch.inputs})
        assert seen == [{0.0}, {1.0}, {2.0}]
        # What hasn't changed is read by the same processes.
        before = pids()
        assert len(list(source.train_batches(plan(epoch=3)))) == 4
        assert pids() == before
        assert len(before) == loader_workers


def test_a_loader_process_is_set_up_by_the_scripts_own_function() -> None:
    def begin(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.transform.level = 10.0 + worker_id  # type: ignore[attr-defined]  # the user's own

    with closing(LoaderSource(Levelled(), loader_workers=1, worker_init=begin)) as source:
        batches = list(source.train_batches(plan()))
    assert {float(level) for batch in batches for level in batch.inputs} == {10.0}


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_pass_may_be_left_in_the_middle(loader_workers: int) -> None:
    with source_of(Noisy(), loader_workers) as source:
        left = source.train_batches(plan())
        next(left)
        batches = list(source.train_batches(plan(epoch=1)))
        assert inputs_of(batches)[:, 0].tolist() == epoch_order(23, 1, 1).tolist()
        with pytest.raises(RuntimeError, match="another pass over this source has begun"):
            next(left)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_the_training_generator_is_left_alone(loader_workers: int) -> None:
    before = torch.get_rng_state(), random.getstate()
    with source_of(Noisy(), loader_workers) as source:
        for epoch in range(2):
            list(source.train_batches(plan(epoch=epoch)))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def fail() -> None:
    raise KeyError("label")


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_an_error_of_the_data_set_names_the_sample(loader_workers: int) -> None:
    with (
        source_of(Doing(fail), loader_workers) as source,
        pytest.raises(DataError, match=r"failed at sample 9: KeyError: 'label'"),
    ):
        list(source.train_batches(plan()))


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: kill_self(signal.SIGKILL), "signal SIGKILL .*memory runs out"),
        (lambda: kill_self(signal.SIGBUS), "signal SIGBUS .*/dev/shm"),
        (lambda: os._exit(3), "exit code 3 while"),
    ],
)
def test_the_death_of_a_loader_process(action: Callable[[], object], message: str) -> None:
    with (
        source_of(Doing(action), 2) as source,
        pytest.raises(InfrastructureError, match=rf"loader process \d+ ended .*{message}"),
    ):
        list(source.train_batches(plan()))


def sleep_long() -> None:
    time.sleep(600)


def stop_self() -> None:
    kill_self(signal.SIGSTOP)


@pytest.mark.parametrize("action", [sleep_long, stop_self])
def test_a_hung_loader_process_is_found_and_killed(
    action: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr("paceline.data.loading.loader._END_S", 0.1)
    before = set(multiprocessing.active_children())
    with (
        source_of(Doing(action), 2, timeout_s=0.5) as source,
        pytest.raises(InfrastructureError, match=r"no batch from the loader processes \d+, \d+ "),
    ):
        list(source.train_batches(plan()))
    assert set(multiprocessing.active_children()) == before


def signal_self() -> None:
    kill_self(signal.SIGINT)
    kill_self(signal.SIGTERM)


def test_loader_processes_ignore_the_trainings_signals() -> None:
    with source_of(Doing(signal_self), 2) as source:
        assert len(list(source.train_batches(plan()))) == 5


def test_the_parents_sharing_strategy_stays() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    with source_of(Noisy(), 1) as source:
        list(source.train_batches(plan()))
    assert torch.multiprocessing.get_sharing_strategy() == before


def _train_until_killed(report: int) -> None:
    dataset = Doing(sleep_long)
    source = LoaderSource(dataset, loader_workers=2)
    batches = source.train_batches(plan())
    next(batches)
    pids = [process.pid for process in multiprocessing.active_children()]
    os.write(report, " ".join(map(str, pids)).encode())
    time.sleep(600)


def test_loader_processes_end_with_a_killed_parent() -> None:
    receive, report = os.pipe()
    parent = multiprocessing.get_context("fork").Process(target=_train_until_killed, args=(report,))
    parent.start()
    os.close(report)
    pids = list(map(int, os.read(receive, 1000).split()))
    assert len(pids) == 2
    parent.kill()
    parent.join()
    # The loader processes hold the pipe's other end: it is at its end once they are gone.
    assert os.read(receive, 1) == b""
    os.close(receive)
    parent.close()


class Unpaired(Noisy):
    def __getitem__(self, index: int) -> dict[str, int]:  # type: ignore[override]
        return {"input": index}


class Shapeless(Noisy):
    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        return f"sample {index}"


def test_batches_keep_the_shape_of_their_items() -> None:
    with source_of(Unpaired(), 0) as source:
        batch = next(source.train_batches(plan()))
    assert isinstance(batch.content, dict)
    assert torch.equal(batch.content["input"], torch.from_numpy(batch.indices))
    with pytest.raises(DataError, match="a dict with input, but a recipe's have to be pairs"):
        batch.pair()


def test_items_may_hold_no_tensor() -> None:
    """A script may make tensors of them itself: by a tokenizer, on its own device."""
    with source_of(Shapeless(), 0) as source:
        batch = next(source.train_batches(plan()))
    assert batch.content == [f"sample {index}" for index in batch.indices]
    with pytest.raises(DataError, match=r"a list of str, .* but a recipe's have to be pairs"):
        batch.pair()


def test_a_data_set_must_be_map_style() -> None:
    with pytest.raises(UsageError, match="generator is not a map-style data set"):
        LoaderSource(n for n in range(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(("channels", "strides"), [(1, (16, 1, 4, 1)), (3, (48, 1, 12, 3))])
def test_channels_last(channels: int, strides: tuple[int, ...]) -> None:
    class Images(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.zeros(channels, 4, 4), index

    source = LoaderSource(Images(), loader_workers=0, memory_format=torch.channels_last)
    assert next(source.train_batches(plan())).inputs.stride() == strides


def test_describe_and_close() -> None:
    source = LoaderSource(Noisy(1234), loader_workers=3)
    assert source.describe() == "Noisy: 1,234 samples, 3 loader processes per worker"
    source.close()
    source.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(source.train_batches(plan()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_batches_reach_a_gpu(loader_workers: int) -> None:
    with closing(LoaderSource(Noisy(), "cuda", loader_workers=loader_workers)) as source:
        batches = list(source.train_batches(plan()))
    assert {batch.inputs.device.type for batch in batches} == {"cuda"}
    assert inputs_of(batches)[:, 0].tolist() == epoch_order(23, 1, 0).tolist()
