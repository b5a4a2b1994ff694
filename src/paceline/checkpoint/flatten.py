"""An optimizer's state as named tensors and JSON, keyed by parameter names, and back, bit for bit.

Names rather than numbers: a state that belongs to another model is noticed instead of loaded askew.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.state_encoding import decode, encode, require_list, require_mapping
from paceline.errors import SnapshotError

# How the update is computed on this machine rather than what is computed: a fresh optimizer's own
# choice stays.
_NOT_STATE = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_ELEMENTWISE = frozenset(
    "momentum_buffer exp_avg exp_avg_sq max_exp_avg_sq exp_inf square_avg grad_avg acc_delta sum "
    "prev step_size ax".split()
)
"""What torch's own optimizers keep for each value of a parameter."""
_DIFFERENCES_SHOWN = 5
_ADDS_AGAIN = "_adds_again"
"""Attribute of an `add_param_group` that `restore_optimizer` has put there."""


def flatten_optimizer(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Take an optimizer's state apart; the tensors are the optimizer's own, not copies.

    Args:
        optimizer: Any whose state is in `state` and `param_groups` (all of torch.optim and
            pytorch_optimizer).
        named_parameters: The unwrapped model's `named_parameters()`.

    Returns:
        Tensors as `<parameter>/<slot>`, and plain JSON: the optimizer's class, its groups (names
        and shapes of parameters; learning rate and other options) and what else isn't a tensor.

    Raises:
        ValueError: The optimizer holds a parameter that isn't among the named ones.
        TypeError: The state holds something that is neither tensor nor JSON.
    """
    for settle in optimizer._optimizer_state_dict_pre_hooks.values():
        settle(optimizer)  # as before `state_dict`
    names = _names_of(optimizer, named_parameters)
    tensors: dict[str, Tensor] = {}
    groups: list[object] = []
    values: dict[str, dict[str, object]] = {}
    # Each group: its options, and its parameters by name with their shapes, to be compared on
    # restoring.
    for number, group in enumerate(optimizer.param_groups):
        options = {
            key: encode(value, f"/groups/{number}/{key}", tensors)
            for key, value in group.items()
            if key not in _NOT_STATE
        }
        shapes = {names[id(p)]: list(p.shape) for p in group["params"]}
        groups.append({"parameters": shapes, "options": options})
        # What the optimizer remembers of each parameter: tensors by name and slot, the rest as
        # JSON.
        for parameter in group["params"]:
            name = names[id(parameter)]
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{slot}"] = value
                else:
                    values.setdefault(name, {})[slot] = encode(value, f"{name}/{slot}", tensors)
    return tensors, {"optimizer": type(optimizer).__name__, "groups": groups, "values": values}


def restore_optimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, object],
    *,
    adds_groups: bool = False,
) -> None:
    """Put back a state that `flatten_optimizer` took apart, or change nothing where it doesn't fit.

    Args:
        optimizer: A fresh one, built as the saved one was.
        named_parameters: The unwrapped model's `named_parameters()`.
        tensors: On any device; they are copied to the parameters' devices and memory formats.
        adds_groups: Add the groups here that the script added while it trained
            (`add_param_group`, as layers are thawed). It may add each once more, until
            `expect_no_groups`: in a resumed epoch it does.

    Raises:
        SnapshotError: Optimizer, parameters, their groups or shapes differ; the first differences
            are named.
        ValueError: The optimizer holds a parameter that isn't among the named ones.
    """
    parameters = dict(named_parameters)
    names = _names_of(optimizer, parameters.items())
    saved = _Saved(tensors, state)
    # All checks come before the first change that isn't undone.
    here = len(optimizer.param_groups)
    if adds_groups and saved.optimizer == type(optimizer).__name__:
        is_named = "param_names" in optimizer.param_groups[0]
        for shapes in _groups_to_come(optimizer, names, saved):
            members = {name: parameters[name] for name in shapes}
            optimizer.add_param_group(
                {"params": list(members.items() if is_named else members.values())}
            )
    differences = _differences(optimizer, names, saved)
    if differences:
        del optimizer.param_groups[here:]
        shown = "; ".join(differences[:_DIFFERENCES_SHOWN])
        more = len(differences) - _DIFFERENCES_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise SnapshotError(f"the snapshot's optimizer state doesn't fit: {shown}{rest}")
    _may_add_again(optimizer, optimizer.param_groups[here:])
    optimizer.state.clear()
    for group, options in zip(optimizer.param_groups, saved.options, strict=True):
        group.update({key: decode(value, tensors) for key, value in options.items()})
        # torch.optim keeps `step` on the host unless the optimizer is capturable or fused.
        step_on_host = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            slots = saved.slots.get(names[id(parameter)], {})
            if slots:
                optimizer.state[parameter] = {
                    slot: _place(value, parameter, on_host=slot == "step" and step_on_host)
                    for slot, value in slots.items()
                }


@final
class _Saved:
    """A flattened state, sorted by parameter."""

    def __init__(self, tensors: Mapping[str, Tensor], state: Mapping[str, object]) -> None:
        groups = [require_mapping(group) for group in require_list(state.get("groups"))]
        self.optimizer = state.get("optimizer")
        self.options = [require_mapping(group.get("options")) for group in groups]
        self.shapes = [
            {
                name: tuple(require_list(shape))
                for name, shape in require_mapping(g.get("parameters")).items()
            }
            for g in groups
        ]
        self.slots: dict[str, dict[str, object]] = {}
        for name, values in require_mapping(state.get("values")).items():
            self.slots[name] = {s: decode(v, tensors) for s, v in require_mapping(values).items()}
        # Keys that begin with "/" are tensors within options and values: `decode` has placed them.
        for key, tensor in tensors.items():
            name, _, slot = key.rpartition("/")
            if not key.startswith("/") and slot not in self.slots.setdefault(name, {}):
                self.slots[name][slot] = tensor


def _differences(optimizer: Optimizer, names: Mapping[int, str], saved: _Saved) -> list[str]:
    kind = type(optimizer).__name__
    if saved.optimizer != kind:
        return [f"it is of {saved.optimizer}, the training uses {kind}"]
    # Parameters by name: the number of their group, and their shape.
    here = {
        names[id(p)]: (number, tuple(p.shape))
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    there = {
        name: (number, shape) for number, g in enumerate(saved.shapes) for name, shape in g.items()
    }
    problems = [f"it lacks {name}" for name in here if name not in there]
    problems += [f"it holds {name}, which the model lacks" for name in there if name not in here]
    for name in here.keys() & there.keys():
        (group, shape), (saved_group, saved_shape) = here[name], there[name]
        if shape != saved_shape:
            problems.append(f"{name} has shape {saved_shape} in it, {shape} in the model")
        elif group != saved_group:
            problems.append(f"{name} is in group {saved_group} in it, in group {group} here")
    if type(optimizer).__module__.startswith("torch.optim."):
        problems += _misshapen_slots(optimizer, names, saved)
    problems += [
        f"it holds a state of unknown {name}" for name in saved.slots.keys() - there.keys()
    ]
    if not problems and len(saved.options) != len(optimizer.param_groups):
        problems.append(f"it has {len(saved.options)} groups, not {len(optimizer.param_groups)}")
    return sorted(problems)


def _groups_to_come(
    optimizer: Optimizer, names: Mapping[int, str], saved: _Saved
) -> Sequence[Mapping[str, object]]:
    """Give the groups that were added as the training went on; none where others differ too."""
    here = len(optimizer.param_groups)
    added = [name for shapes in saved.shapes[here:] for name in shapes]
    held = {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    return saved.shapes[here:] if set(added) <= set(names.values()) - held else ()


def _may_add_again(optimizer: Optimizer, groups: Sequence[Mapping[str, Sequence[Tensor]]]) -> None:
    """Let a script add each of these groups, which the optimizer has, once: it changes nothing."""
    if not groups:
        return
    usual = optimizer.add_param_group
    expected = [set(map(id, group["params"])) for group in groups]

    @wraps(usual)
    def add_param_group(param_group: dict[str, object]) -> None:
        given = param_group["params"]
        if isinstance(given, Iterator):  # to be read twice
            given = list(given)
        members = [given] if isinstance(given, Tensor) else cast("Iterable[object]", given)
        own = {id(member[1] if isinstance(member, tuple) else member) for member in members}
        held = [set(map(id, group["params"])) for group in optimizer.param_groups]
        if own in expected and own in held:
            expected.remove(own)
        else:
            usual({**param_group, "params": given})

    vars(add_param_group)[_ADDS_AGAIN] = True
    vars(optimizer)["add_param_group"] = add_param_group


def expect_no_groups(optimizer: Optimizer) -> None:
    """Let a script add groups as it always could, once what was resumed is behind it."""
    if hasattr(vars(optimizer).get("add_param_group"), _ADDS_AGAIN):
        del vars(optimizer)["add_param_group"]


def _misshapen_slots(
    optimizer: Optimizer, names: Mapping[int, str], saved: _Saved
) -> Iterator[str]:
    """Find slots with a value for each of a parameter's, whose shape isn't the parameter's."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name, shape = names[id(parameter)], tuple(parameter.shape)
            for slot, value in saved.slots.get(name, {}).items():
                if slot in _ELEMENTWISE and isinstance(value, Tensor) and value.shape != shape:
                    yield (
                        f"{slot} of {name} has shape {tuple(value.shape)} in it, the parameter "
                        f"{shape}"
                    )


def _names_of(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> dict[int, str]:
    names = {id(parameter): name for name, parameter in named_parameters}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"group {number} of the optimizer holds a parameter of shape "
                    f"{tuple(parameter.shape)} that isn't one of the model's named parameters"
                )
    return names


def _place(value: object, parameter: Tensor, *, on_host: bool) -> object:
    if not isinstance(value, Tensor):
        return value
    device = torch.device("cpu") if on_host else parameter.device
    if value.shape != parameter.shape:
        return value.detach().to(device, copy=True)
    # Sums over a tensor depend on its memory order, so the state gets the one it would have been
    # made with.
    like = torch.empty_like(parameter, dtype=value.dtype, device=device, requires_grad=False)
    return like.copy_(value)
