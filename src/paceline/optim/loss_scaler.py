"""Loss scaling for fp16, whose steps that overflow are undone on the device: nobody waits for it.

PyTorch's scaler asks the device before each step of an optimizer whether all gradients are finite.
Its fused optimizers leave out steps on the device; here those that aren't fused do so as well.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from paceline.distributed.device import features, free_bytes
from paceline.optim.table import OPTIMIZERS, OptimizerEntry

OF_SESSION = "_is_of_session"
"""Attribute of an optimizer's `step`, and of a hook on steps, that a session has put there."""
_COUNT = "step"
"""Where optimizers count their steps: for a parameter, or in a group."""


@final
class LossScaler(torch.amp.GradScaler):
    """PyTorch's scaler, with the same bits; on GPUs it doesn't wait for steps of those optimizers
    that Paceline knows."""

    def __init__(self, device: str, **options: Any) -> None:
        """Create the loss scaler.

        Args:
            device: Type of the device that gradients are on.
            options: PyTorch's.
        """
        super().__init__(device, **options)
        self._steps: dict[Optimizer, _UndoableSteps] = {}

    # torch 2.15 has no other place where what decides about a step could be replaced.
    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        flags: Mapping[torch.device, Tensor] = optimizer_state["found_inf_per_device"]
        entry = _entry_of(optimizer)
        if entry is not None and len(flags) == 1 and features(next(iter(flags))).has_fused:
            steps = self._steps.get(optimizer)
            if steps is None:
                steps = self._steps[optimizer] = _UndoableSteps(optimizer, entry)
            if _has_plain_step(optimizer):
                return steps.take(next(iter(flags.values())))
            steps.settle()
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def settle(self) -> None:
        """Make the optimizers' counts right where steps were undone. Waits for the device."""
        for steps in self._steps.values():
            steps.settle()


def _entry_of(optimizer: Optimizer) -> OptimizerEntry | None:
    kind = type(optimizer)
    for entry in OPTIMIZERS.values():
        if kind.__name__ == entry.class_name and kind.__module__.startswith(entry.module):
            return entry
    return None


def _has_plain_step(optimizer: Optimizer) -> bool:
    """Tell whether nothing reads the weights between a step and its being undone."""
    hooks = {
        **optimizer._optimizer_step_pre_hooks,
        **optimizer._optimizer_step_post_hooks,
        **torch_optimizer._global_optimizer_pre_hooks,
        **torch_optimizer._global_optimizer_post_hooks,
    }
    is_hooked = not all(getattr(hook, OF_SESSION, False) for hook in hooks.values())
    # The session's own wrapper, and that of a learning-rate scheduler, do nothing to the weights.
    step, plain = optimizer.step, type(optimizer).step
    while getattr(step, "_wrapped_by_lr_sched", False) or getattr(step, OF_SESSION, False):
        step = step.__wrapped__  # type: ignore[attr-defined]  # both have it
    return not is_hooked and getattr(step, "__func__", step) in (plain, unwrap(plain))


@final
@dataclass(kw_only=True)
class _StepState:
    """Copies of the weights and state that an optimizer step changes, to undo it."""

    layout: list[tuple[int, int]] = field(default_factory=list)
    """Each parameter, and how much is remembered of it."""
    tensors: dict[torch.dtype, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Weights and state on the device."""
    counts: list[Tensor] = field(default_factory=list)
    """On the host: each parameter's steps."""

    @classmethod
    def by(cls, optimizer: Optimizer) -> "_StepState":
        """Collect an optimizer's current weights and state."""
        held, states = cls(), optimizer.state
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = states.get(parameter, {})
                held.layout.append((id(parameter), len(state)))
                held.tensors[parameter.dtype].append(parameter.detach())
                for name, value in state.items():
                    if name == _COUNT and isinstance(value, Tensor) and value.is_cpu:
                        held.counts.append(value)
                    elif isinstance(value, Tensor):
                        held.tensors[value.dtype].append(value)
        return held

    def can_be_copied(self, device: torch.device) -> bool:
        """Tell whether the kernel that copies takes these tensors."""
        return all(
            tensor.is_floating_point()
            and tensor.layout is torch.strided
            and tensor.device == device
            and torch.empty_like(tensor).stride() == tensor.stride()
            for tensors in self.tensors.values()
            for tensor in tensors
        )


@final
class _UndoableSteps:
    """Takes an optimizer's steps at once, and undoes on the device those with overflows.

    What the optimizer counts on the host is ahead by the steps that were undone since `settle`.
    """

    def __init__(self, optimizer: Optimizer, entry: OptimizerEntry) -> None:
        """Create the undoable steps.

        Args:
            optimizer: Its counts are settled before its state is read or replaced.
            entry: Its row in the table of optimizers.
        """
        self._optimizer, self._entry = optimizer, entry
        self._layout: list[tuple[int, int]] | None = None
        """State layout after a step that was surely taken; None: steps can't be undone yet."""
        self._has_memory = True
        self._counts: list[Tensor] = []
        """The optimizer's step counts on the host, of the last step."""
        self._undone: Tensor | None = None
        """On the device: how many steps were undone."""
        self._undone_on_host: Tensor | None = None
        """In pinned memory: the same, once `_arrival` is past."""
        self._arrival: torch.Event | None = None
        self._settled = 0
        """How many undone steps have been subtracted from the counts."""
        optimizer.register_state_dict_pre_hook(lambda _: self.settle())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle())

    @torch.no_grad()
    def take(self, overflows: Tensor) -> object:
        """Take a step if all gradients are finite. Local to the worker.

        Args:
            overflows: () float32, on the device: 1 where one isn't finite, else 0.

        Returns:
            What the optimizer's `step` gives.
        """
        if any(_depends_on_count(group, self._entry) for group in self._optimizer.param_groups):
            self.settle()  # of the step before, which is long over
        before = _StepState.by(self._optimizer)
        # What a first step makes can't be taken away on the device.
        if before.layout != self._layout or not self._has_memory:
            return self._take_if_fine(overflows)
        try:
            spare = {kind: _like(tensors) for kind, tensors in before.tensors.items()}
            scratch = {kind: _scratch(tensors) for kind, tensors in before.tensors.items()}
        except torch.OutOfMemoryError:
            self._has_memory = False
            return self._take_if_fine(overflows)
        # Copy what the step changes, take it, copy it back; but where it counts, nothing is copied.
        is_fine = 1 - overflows
        for kind, tensors in before.tensors.items():
            _copy_unless(is_fine, tensors, spare[kind], scratch[kind])
        result: object = self._optimizer.step()
        after = _StepState.by(self._optimizer)  # some optimizers put others in the place of tensors
        for kind, tensors in after.tensors.items():
            _copy_unless(is_fine, spare[kind], tensors, spare[kind])
        self._counts = after.counts
        if self._counts or any(_COUNT in group for group in self._optimizer.param_groups):
            self._count(overflows)
        return result

    def settle(self) -> None:
        """Take steps that were undone from the optimizer's counts. Waits for the last step."""
        if self._arrival is None or self._undone_on_host is None:
            return
        if not self._arrival.query():
            self._arrival.synchronize()
        self._arrival = None
        undone = int(self._undone_on_host) - self._settled
        self._settled += undone
        if undone:
            for count in self._counts:
                count -= undone
            for group in self._optimizer.param_groups:
                if isinstance(group.get(_COUNT), int):
                    group[_COUNT] -= undone

    def _take_if_fine(self, overflows: Tensor) -> object:
        """Take a step as PyTorch's scaler does: the host waits for the device's answer."""
        self.settle()
        if overflows.item():
            return None
        result: object = self._optimizer.step()
        # From now on steps can be undone, if its tensors can be copied and there is memory for it.
        state = _StepState.by(self._optimizer)
        self._layout = state.layout if state.can_be_copied(overflows.device) else None
        # The step needs room as well, of up to the same size.
        size = sum(tensor.nbytes for tensors in state.tensors.values() for tensor in tensors)
        self._has_memory = not 0 < free_bytes(overflows.device) < 2 * size
        return result

    def _count(self, overflows: Tensor) -> None:
        """Count undone steps, and copy their number to the host asynchronously."""
        if self._undone is None or self._undone_on_host is None:
            self._undone = torch.zeros_like(overflows)
            self._undone_on_host = torch.zeros((), dtype=overflows.dtype, pin_memory=True)
        self._undone += overflows
        self._undone_on_host.copy_(self._undone, non_blocking=True)
        self._arrival = torch.Event(overflows.device)
        self._arrival.record()


def _depends_on_count(group: Mapping[str, Any], entry: OptimizerEntry) -> bool:
    """Tell whether a step of a group computes with how many came before."""
    with_bias = bool(group.get("adam_debias")) != bool(entry.group.get("adam_debias"))
    return entry.counts_steps or with_bias or bool(group.get("rectify"))


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _scratch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Give tensors of the same shapes that share memory: what is written there is never read."""
    place = tensors[0].new_empty(max(tensor.numel() for tensor in tensors))
    return [place.as_strided(tensor.shape, tensor.stride()) for tensor in tensors]


def _copy_unless(
    flag: Tensor, sources: Sequence[Tensor], targets: Sequence[Tensor], scratch: Sequence[Tensor]
) -> None:
    """Copy tensors bit by bit if a flag on their device is 0: else the kernels end at once.

    They are those of PyTorch's fused SGD, which take the flag for `found_inf`. As a first step they
    set momentum, here the targets, to the gradient, here the sources.

    Args:
        flag: () float32.
        sources: Of one type of floating point.
        targets: Of the same shapes and strides.
        scratch: Likewise: weights that such a step updates. They may be the sources.
    """
    torch._fused_sgd_(
        list(scratch),
        list(sources),
        list(targets),
        weight_decay=0.0,
        momentum=1.0,
        lr=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
        found_inf=flag,
    )
