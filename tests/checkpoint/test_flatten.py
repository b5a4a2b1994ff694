import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.flatten import expect_no_groups, flatten_optimizer, restore_optimizer
from paceline.checkpoint.format import Snapshot, copy_to_host, read_snapshot, write_host_snapshot
from paceline.errors import SnapshotError

Build = Callable[[Iterable[Tensor]], Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam amsgrad loop": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "novograd": lambda p: pytorch_optimizer.NovoGrad(p, lr=0.01, weight_decay=0.01),
    "lars": lambda p: pytorch_optimizer.LARS(p, lr=0.5, weight_decay=0.01),
    "lamb": lambda p: pytorch_optimizer.Lamb(p, lr=0.01, weight_decay=0.01),
}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)
    )
    return made.to(memory_format=torch.channels_last)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        # As a schedule does it: the rate in the group is part of the state.
        for group in optimizer.param_groups:
            if not isinstance(group["lr"], Tensor):
                group["lr"] *= 0.9
        optimizer.step()


def through_disk(directory: Path, model: nn.Module, optimizer: Optimizer) -> Snapshot:
    tensors, state = flatten_optimizer(optimizer, model.named_parameters())
    groups = {"model": model.state_dict(), "optimizer": tensors}
    write_host_snapshot(
        directory, copy_to_host(Snapshot(step=5, tensors=groups, state={"optimizer": state}))
    )
    return read_snapshot(directory)


def restore(snapshot: Snapshot, model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict(dict(snapshot.tensors["model"]))
    state = snapshot.state["optimizer"]
    assert isinstance(state, dict)
    restore_optimizer(optimizer, model.named_parameters(), snapshot.tensors["optimizer"], state)


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_goes_on_bit_for_bit(build: Build, tmp_path: Path) -> None:
    whole = net()
    whole_optimizer = build(whole.parameters())
    train(whole, whole_optimizer, range(10))

    first = net()
    optimizer = build(first.parameters())
    train(first, optimizer, range(5))
    snapshot = through_disk(tmp_path / "s", first, optimizer)

    second = net(seed=1)
    fresh = build(second.parameters())
    restore(snapshot, second, fresh)
    train(second, fresh, range(5, 10))
    for (name, a), b in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert_same_state(whole_optimizer, fresh)


def assert_same_state(a: Optimizer, b: Optimizer) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for number, slots in left["state"].items():
        others = right["state"][number]
        assert slots.keys() == others.keys()
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, others[slot])
                assert (value.dtype, value.stride()) == (others[slot].dtype, others[slot].stride())
            else:
                assert value == others[slot]
                assert type(value) is type(others[slot])


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_state_before_the_first_step_is_restored_too(build: Build, tmp_path: Path) -> None:
    model = net()
    snapshot = through_disk(tmp_path / "s", model, build(model.parameters()))
    other = net(seed=1)
    optimizer = build(other.parameters())
    train(other, optimizer, range(2))
    restore(snapshot, other, optimizer)
    assert len(optimizer.state) == 0


def test_several_groups_keep_their_own_options(tmp_path: Path) -> None:
    def build(model: nn.Module) -> Optimizer:
        groups: list[dict[str, object]] = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "betas": (0.5, 0.6)},
        ]
        return torch.optim.AdamW(groups)

    model = net()
    optimizer = build(model)
    train(model, optimizer, range(3))
    snapshot = through_disk(tmp_path / "s", model, optimizer)
    other = net(seed=1)
    fresh = build(other)
    restore(snapshot, other, fresh)
    assert fresh.param_groups[1]["betas"] == (0.5, 0.6)
    assert_same_state(optimizer, fresh)


class Odd(torch.optim.SGD):
    """Holds every kind of value that a state may hold."""


def test_values_of_all_kinds_come_back() -> None:
    model = nn.Linear(2, 1, bias=False)
    values = {
        "count": 3,
        "flag": True,
        "nothing": None,
        "infinite": float("-inf"),
        "third": 1 / 3,
        "pair": (1, (2.0, None)),
        "history": [torch.tensor([1.0]), 2],
        "wide": torch.tensor([1.0, 2.0], dtype=torch.float64),
    }
    optimizer = Odd(model.parameters())
    optimizer.state[model.weight] = copy.deepcopy(values)
    tensors, state = flatten_optimizer(optimizer, model.named_parameters())
    state = json.loads(json.dumps(state, allow_nan=False))
    fresh = Odd(model.parameters())
    restore_optimizer(fresh, model.named_parameters(), tensors, state)
    assert str(fresh.state[model.weight]) == str(values)
    assert fresh.state[model.weight]["wide"] is not optimizer.state[model.weight]["wide"]


def test_how_it_is_computed_here_is_not_part_of_the_state() -> None:
    model = net()
    tensors, state = flatten_optimizer(
        torch.optim.Adam(model.parameters(), foreach=True), model.named_parameters()
    )
    other = torch.optim.Adam(model.parameters(), foreach=False)
    restore_optimizer(other, model.named_parameters(), tensors, state)
    assert other.param_groups[0]["foreach"] is False


def saved_adam(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, object]]:
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return flatten_optimizer(optimizer, model.named_parameters())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "it lacks 1.bias; it lacks 1.weight"),
        (nn.Sequential(nn.Linear(2, 3, bias=False)), "it holds 0.bias, which the model lacks"),
        (
            nn.Sequential(nn.Linear(4, 3)),
            r"0.weight has shape \(3, 2\) in it, \(3, 4\) in the model",
        ),
        (
            nn.Sequential(*(nn.Linear(2, 3) for _ in range(6))),
            "it lacks 3.bias; and 5 more",
        ),
    ],
)
def test_another_model_is_refused_and_nothing_changed(model: nn.Module, message: str) -> None:
    tensors, state = saved_adam(nn.Sequential(nn.Linear(2, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    with pytest.raises(SnapshotError, match=message):
        restore_optimizer(optimizer, model.named_parameters(), tensors, state)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("named", [False, True])
def test_groups_that_came_while_it_trained_come_back_and_may_be_added_once_more(
    named: bool,
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1))

    def of(*places: int) -> list[nn.Parameter] | list[tuple[str, nn.Parameter]]:
        pairs = [pair for i in places for pair in model[i].named_parameters(prefix=str(i))]
        return pairs if named else [parameter for _, parameter in pairs]

    optimizer = torch.optim.Adam(of(2))
    optimizer.add_param_group({"params": of(0), "lr": 0.1})
    optimizer.add_param_group({"params": of(1)[:1], "betas": (0.5, 0.6)})
    model(torch.ones(5, 2)).sum().backward()
    optimizer.step()
    tensors, state = flatten_optimizer(optimizer, model.named_parameters())
    resumed = torch.optim.Adam(of(2))
    restore_optimizer(resumed, model.named_parameters(), tensors, state, adds_groups=True)

    def assert_the_same() -> None:
        ours, theirs = resumed.state_dict(), optimizer.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert str(ours["state"]) == str(theirs["state"])
        groups = zip(resumed.param_groups, optimizer.param_groups, strict=True)
        assert all(list(map(id, a["params"])) == list(map(id, b["params"])) for a, b in groups)

    assert_the_same()
    resumed.add_param_group({"params": of(1)[:1], "betas": (0.5, 0.6)})
    resumed.add_param_group({"params": iter(of(0)), "lr": 0.1})
    assert_the_same()
    for again in (of(0), of(1)[:1]):
        with pytest.raises(ValueError, match="more than one parameter group"):
            resumed.add_param_group({"params": again})
    resumed.add_param_group({"params": of(1)[1:], "lr": 0.3})
    assert [group["lr"] for group in resumed.param_groups] == [1e-3, 0.1, 1e-3, 0.3]


def test_a_group_that_came_and_went_is_added_as_any_other() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model[1].parameters())
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
    tensors, state = flatten_optimizer(optimizer, model.named_parameters())

    def resumed() -> torch.optim.Adam:
        made = torch.optim.Adam(model[1].parameters())
        restore_optimizer(made, model.named_parameters(), tensors, state, adds_groups=True)
        return made

    regrouped = resumed()
    regrouped.param_groups.pop()
    regrouped.add_param_group({"params": model[0].parameters(), "lr": 0.7})
    assert [group["lr"] for group in regrouped.param_groups] == [1e-3, 0.7]
    with pytest.raises(TypeError, match="ordered"):
        resumed().add_param_group({"params": set(model[1].parameters())})
    later = resumed()
    expect_no_groups(later)
    expect_no_groups(optimizer)
    with pytest.raises(ValueError, match="more than one parameter group"):
        later.add_param_group({"params": model[0].parameters()})


def test_groups_that_other_workers_have_are_not_added() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model[1].parameters())
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.1})
    tensors, state = flatten_optimizer(optimizer, model.named_parameters())
    other = torch.optim.Adam(model[1].parameters())
    with pytest.raises(SnapshotError, match=r"it holds 0\.bias, which the model lacks"):
        restore_optimizer(other, model.named_parameters(), tensors, state)
    assert len(other.param_groups) == 1


def test_groups_that_came_are_gone_again_where_the_rest_doesnt_fit() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model[1].parameters())
    optimizer.add_param_group({"params": model[0].parameters()})
    tensors, state = flatten_optimizer(optimizer, model.named_parameters())
    other = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1))
    resumed = torch.optim.Adam(other[1].parameters())
    with pytest.raises(SnapshotError, match="has shape"):
        restore_optimizer(resumed, other.named_parameters(), tensors, state, adds_groups=True)
    assert len(resumed.param_groups) == 1
    resumed.add_param_group({"params": other[0].parameters()})


def test_parameters_that_are_grouped_otherwise_did_not_come_while_it_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": layer.parameters()} for layer in model]
    tensors, state = flatten_optimizer(torch.optim.Adam(groups), model.named_parameters())
    resumed = torch.optim.Adam(model.parameters())
    with pytest.raises(SnapshotError, match=r"1\.bias is in group 1 in it, in group 0 here"):
        restore_optimizer(resumed, model.named_parameters(), tensors, state)


def test_another_optimizer_is_refused() -> None:
    model = nn.Linear(2, 3)
    tensors, state = saved_adam(model)
    with pytest.raises(SnapshotError, match="it is of Adam, the training uses SGD"):
        restore_optimizer(
            torch.optim.SGD(model.parameters()), model.named_parameters(), tensors, state
        )


def test_other_groups_are_refused() -> None:
    model = nn.Linear(2, 3)
    tensors, state = saved_adam(model)
    groups: list[dict[str, object]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    regrouped = torch.optim.Adam(groups)
    with pytest.raises(SnapshotError, match="bias is in group 0 in it, in group 1 here"):
        restore_optimizer(regrouped, model.named_parameters(), tensors, state)


def test_a_state_with_pieces_missing_is_refused() -> None:
    model = nn.Linear(2, 3)
    tensors, state = saved_adam(model)
    optimizer = torch.optim.Adam(model.parameters())
    for broken in ({}, {**state, "groups": 3}, {**state, "values": None}):
        with pytest.raises(SnapshotError, match="isn't complete"):
            restore_optimizer(optimizer, model.named_parameters(), tensors, broken)
    stray = {**tensors, "ghost/exp_avg": torch.zeros(1)}
    with pytest.raises(SnapshotError, match="state of unknown ghost"):
        restore_optimizer(optimizer, model.named_parameters(), stray, state)


@pytest.mark.parametrize("kind", ["sgd momentum", "adam", "adadelta"])
def test_slots_of_another_shape_are_refused_and_named(kind: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, range(2))
    tensors, state = flatten_optimizer(optimizer, model.named_parameters())
    name = next(name for name in tensors if name.startswith("4.weight/") and "step" not in name)
    parameter, _, slot = name.rpartition("/")
    spoilt = {**tensors, name: torch.zeros(3)}
    fresh = OPTIMIZERS[kind](model.parameters())
    with pytest.raises(SnapshotError) as caught:
        restore_optimizer(fresh, model.named_parameters(), spoilt, state)
    assert f"{slot} of {parameter} has shape (3,) in it, the parameter (5, 128)" in str(
        caught.value
    )
    assert not fresh.state


def test_a_parameter_without_a_name_is_our_callers_mistake() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ValueError, match="isn't one of the model's named parameters"):
        flatten_optimizer(optimizer, [])


def test_what_json_cant_hold_is_named() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["odd"] = object()
    with pytest.raises(TypeError, match="the state weight/odd is a object"):
        flatten_optimizer(optimizer, model.named_parameters())
