import math

import torch
from torch import Tensor, nn

from paceline.gradient_sync.buffers import PartBuffers, pack, put, stand_in_mode, unpack


class Holder(nn.Module):
    """Buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("coarse", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def fill(buffers: PartBuffers, value: int) -> None:
    for offset, buffer in enumerate(buffers.live().values()):
        buffer.fill_(value + offset)


def test_only_saved_buffers_in_a_fixed_order() -> None:
    floats = PartBuffers(Holder(), range(1), with_integers=False)
    assert list(floats.live()) == ["coarse", "norm.running_mean", "norm.running_var"]
    every = PartBuffers(Holder(), range(1), with_integers=True)
    assert list(every.live()) == [
        "coarse",
        "norm.num_batches_tracked",
        "norm.running_mean",
        "norm.running_var",
    ]


def test_packing_loses_nothing() -> None:
    source = PartBuffers(Holder(), range(1), with_integers=True)
    fill(source, 5)
    target = PartBuffers(Holder(), range(1), with_integers=True)
    unpack(pack(list(source.live().values())), list(target.live().values()))
    assert all(map(torch.equal, source.live().values(), target.live().values()))


def test_every_part_has_a_set_of_its_own() -> None:
    holder = Holder()
    buffers = PartBuffers(holder, range(4, 7), with_integers=True)
    for step in range(2):
        for part in (4, 5, 6):
            buffers.enter(part)
            assert int(holder.norm.get_buffer("num_batches_tracked")) == step * part
            for buffer in buffers.live().values():
                buffer.add_(part)
    rows = buffers.rows()
    assert rows[:, 2].contiguous().view(torch.int64).tolist() == [8, 10, 12]  # the bits of int64

    again = PartBuffers(Holder(), range(4, 7), with_integers=True)
    again.restore(rows)
    again.enter(6)
    again.enter(5)
    assert torch.equal(again.rows(), rows)


def test_a_buffer_that_was_replaced_is_still_found() -> None:
    holder = Holder()
    buffers = PartBuffers(holder, range(2), with_integers=False)
    holder.coarse = torch.full((2,), 7.0, dtype=torch.bfloat16)
    assert buffers.live()["coarse"].tolist() == [7.0, 7.0]
    buffers.enter(1)
    assert holder.coarse.tolist() == [0.0, 0.0]
    buffers.enter(0)
    assert holder.coarse.tolist() == [7.0, 7.0]


def test_floats_are_averaged_and_of_integers_the_first_parts_are_taken() -> None:
    buffers = PartBuffers(Holder(), range(1), with_integers=True)
    found = []
    for value in (3, 6):
        for buffer in buffers.live().values():
            buffer.fill_(value)
        found.append(buffers.rows()[0])
    rows = torch.stack(found)
    mean = buffers.averaged(rows)
    assert mean["norm.running_mean"].tolist() == [4.5] * 3
    assert mean["coarse"].dtype == torch.bfloat16
    assert mean["norm.num_batches_tracked"].item() == 3
    put(buffers.live(), mean)
    assert torch.equal(buffers.rows()[0], pack(list(mean.values())))


def test_a_model_without_buffers_has_empty_rows() -> None:
    buffers = PartBuffers(nn.Linear(2, 2), range(3), with_integers=True)
    buffers.enter(2)
    rows: Tensor = buffers.rows()
    assert tuple(rows.shape) == (3, 0)
    assert buffers.averaged(rows) == {}


def test_buffers_that_follow_a_parts_samples_are_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("codes", torch.tensor([1.0, 1e-6]))
            self.register_buffer("nothing", torch.zeros(0))
            self.register_buffer("steps", torch.tensor(5))

    def row(**changed: Tensor) -> Tensor:
        model = Model()
        for name, value in changed.items():
            model.get_buffer(name.replace("_", ".", 1)).copy_(value)
        return PartBuffers(model, range(1), with_integers=True).rows()[0]

    buffers = PartBuffers(Model(), range(1), with_integers=True)
    same = row()

    def named(other: Tensor) -> list[str]:
        return buffers.name_differing(torch.stack([same, other]))

    assert named(same) == []
    assert named(row(codes=torch.tensor([1.0, 0.1]))) == ["codes"]
    assert named(row(codes=torch.tensor([math.nan, 1e-6]))) == ["codes"]
    assert named(row(codes=torch.tensor([1 + 1e-6, 2e-6]))) == []  # rounding, on other hardware
    assert named(row(norm_running_mean=torch.ones(3))) == []  # a normalization's are its own affair
    assert named(row(steps=torch.tensor(-6))) == []  # of integers the first part's are taken


def test_buffers_that_arent_numbers_anywhere_are_the_same() -> None:
    holder = Holder()
    holder.get_buffer("coarse").fill_(math.nan)
    buffers = PartBuffers(holder, range(1), with_integers=True)
    assert buffers.name_differing(buffers.rows().repeat(2, 1)) == []


class Buffered(nn.Module):
    """Has buffers of all kinds, and changes some in each forward pass."""

    in_place: Tensor
    replaced: Tensor
    grown: Tensor
    late: Tensor | None
    by_hand: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("in_place", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2), persistent=False)
        self.register_buffer("grown", torch.zeros(1))
        self.register_buffer("late", None)
        self.register_buffer("expanded", torch.arange(3).expand(2, 3))
        self.register_buffer("by_hand", torch.zeros(1))
        with torch.inference_mode():
            self.register_buffer("inferred", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.training
        self.in_place += 1
        self.replaced = self.replaced + 1
        self.grown = torch.cat([self.grown, inputs.detach().sum()[None]])
        self.late = inputs.detach()
        scores: Tensor = self.norm(inputs) * self.in_place.clone()
        return scores


def test_a_stand_in_leaves_buffers_and_modes_as_they_were() -> None:
    model = Buffered()
    before = {name: None if b is None else b.clone() for name, b in model._buffers.items()}
    held = model.in_place
    with stand_in_mode([model]):
        model(torch.randn(1, 2)).sum().backward()
        model.by_hand.fill_(3)
        assert model.in_place[0] == 1
    assert model.in_place is held
    assert model.norm.training
    assert not model.norm.get_buffer("running_mean").any()
    for name, values in before.items():
        now = getattr(model, name)
        if name == "by_hand":
            assert now == 3  # by the script, not by a forward pass
        else:
            assert now is None if values is None else torch.equal(now, values)
