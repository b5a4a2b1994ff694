"""Models, optimizers, schedulers and other state of a training: what snapshots hold.

Models are prepared here: moved to the device, given a memory format and SyncBatchNorm, compiled.
"""

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, wraps
from types import SimpleNamespace
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.flatten import expect_no_groups, restore_optimizer
from paceline.checkpoint.state_encoding import encode
from paceline.data.batch import map_tensors
from paceline.data.fingerprint import find_held
from paceline.distributed.device import features, is_accelerator
from paceline.distributed.group import Group
from paceline.errors import UsageError
from paceline.gradient_sync.batchnorm import synchronise_batchnorm
from paceline.gradient_sync.replica import Forward
from paceline.launch.heartbeat import COMPILING, note
from paceline.training.batches.loader import EvalLoader, Loader
from paceline.training.nondeterministic import refuse_nondeterministic
from paceline.training.options import CompileMode, ComputeOptions, Precision
from paceline.training.run_record.numerics import refuses_nondeterministic
from paceline.training.snapshots.script_state import KeptValues, LoopState, PerPartState, Stateful
from paceline.training.weight_average import WeightAverage

UNKNOWN_SCHEDULER = (
    "a learning-rate scheduler that the session doesn't know: a resumed training would begin its "
    "schedule anew. Give it to s.prepare(...) or s.scheduler(...), unless the script makes it from "
    "s.steps_done"
)


@final
@dataclass(kw_only=True)
class Components:
    """The registered models, optimizers and other state, each kind in order of registration."""

    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
    others: dict[str, Stateful] = field(default_factory=dict)
    loaders: list[Loader | EvalLoader] = field(default_factory=list)
    per_part: PerPartState = field(default_factory=PerPartState)
    """What every worker, or every shard, has a state of its own of."""

    resumed: "ResumedState | None" = None
    """What a snapshot that was taken within an epoch has put here, until its next batch."""
    behind_batches: LoopState | None = None
    """What the script's loop had set when an epoch's batches came to their end, until the epoch's
    does."""
    channels_last: bool = False
    """Whether a recipe has its images and convolutions laid out channels-last."""
    unseeded: list[str] = field(default_factory=list)
    """Names of models whose first weights were drawn without a seed, before the session."""
    _looks_for_schedulers: bool = True
    """Whether schedulers that the loop makes haven't been looked for yet."""
    average: WeightAverage | None = None
    """The moving average of the weights, with `--ema`; evaluations take it."""

    @property
    def model(self) -> nn.Module:
        """The model; with several, one module that holds them under their names."""
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        return nn.ModuleDict(self.models)

    @property
    def train_loader(self) -> Loader | None:
        """The loader whose steps are counted: the first one to train on."""
        return next((loader for loader in self.loaders if isinstance(loader, Loader)), None)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Put the weights that are evaluated into the models for a block. Local to the worker."""
        return nullcontext() if self.average is None else self.average.in_place()

    def keep(self, name: str, kept: Stateful, *, per_worker: bool) -> None:
        """Register state of the script's own for snapshots: the training's, or each worker's.

        Raises:
            UsageError: The name is taken.
        """
        if name in self.stateful() or name in self.per_part.objects:
            raise UsageError(f"{name!r} is in the snapshots already: give it another name")
        place = self.per_part.objects if per_worker else self.others
        place[name] = kept

    def check_name(self, name: str) -> None:
        """Refuse a name that a further model can't have.

        Raises:
            UsageError: There is a model of this name, or it is no plain word.
        """
        if name in self.models:
            raise UsageError(f"there is a model {name!r} already: s.model(..., name='another')")
        if not name.isidentifier() or name in dir(nn.ModuleDict):
            raise UsageError(
                f"a model can't be named {name!r}: give it a plain word such as 'generator'"
            )

    def note_resumed(self, reload: "Reload | None") -> None:
        """Remember what a snapshot taken within an epoch has put here. Local.

        The script runs the beginning of that epoch's body a second time, and may change there what
        it has changed before: step a schedule, set a hidden state anew, rescale weights.

        Args:
            reload: Puts the snapshot's tensors back; None where each worker has weights of its own.
        """
        self.resumed = ResumedState(self._loop_state(), self._slots(), reload)
        self.per_part.note_resumed()

    def put_back(self) -> list[str]:
        """Undo what the script has changed since; the epoch's first batch follows. Local.

        Returns:
            What that was, besides values that it keeps.
        """
        self.behind_batches = None
        self.per_part.put_back()
        resumed, self.resumed = self.resumed, None
        if resumed is None:
            return []
        # Such schedulers set the rates they begin with: under others they would go on wrongly.
        begun_anew = [scheduler.optimizer for scheduler in self.unknown_schedulers()]
        options = LoopState(begun_anew, {})
        weights = list[str]()
        if resumed.reload is not None:
            if self._slots() != resumed.slots:
                resumed.reload.optimizers()
            weights += ["weights"] if resumed.reload.weights() else []
        options.put_back()
        changed = resumed.loop.put_back(leave=begun_anew)
        return [n for n in changed if not isinstance(self.others.get(n), KeptValues)] + weights

    def note_end_of_batches(self, *, writes: bool) -> None:
        """Remember what the script's loop has set by the end of an epoch's batches. Local.

        A training that is resumed behind them does again what follows, such as a schedule's step:
        so a snapshot taken there has these.

        Args:
            writes: Whether this worker writes snapshots: the others save no object.
        """
        self.behind_batches = self._loop_state() if writes else LoopState(self.optimizers, {})
        for optimizer in self.optimizers:
            expect_no_groups(optimizer)

    def makes_schedulers(self) -> bool:
        """Tell whether the loop, which is running, has made a scheduler for itself; asked once."""
        looks, self._looks_for_schedulers = self._looks_for_schedulers, False
        return looks and not self.has_unknown_scheduler() and bool(self.unknown_schedulers())

    def _loop_state(self) -> LoopState:
        kept = {n: one for n, one in self.stateful().items() if not isinstance(one, Loader)}
        return LoopState(self.optimizers, kept)

    def _slots(self) -> list[tuple[int, int]]:
        """Tell optimizers' tensors apart, and what they held: a change in place makes another."""
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        slots = (slot for state in states for slot in state.values())
        return [(id(slot), slot._version) for slot in slots if isinstance(slot, Tensor)]

    def check_optimizers(self) -> None:
        """Refuse an optimizer of parameters that no model here has.

        Raises:
            UsageError: There is one; says what is missing.
        """
        known = {id(p) for model in self.models.values() for p in model.parameters()}
        for optimizer in self.optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            unregistered = [tuple(p.shape) for p in held if id(p) not in known]
            if unregistered:
                raise UsageError(
                    f"the {type(optimizer).__name__} updates parameters of no model of this "
                    f"session (one has the shape {unregistered[0]}): take their model in by "
                    "s.model(...); where it is a parameter by itself, "
                    "s.model(nn.ParameterList([parameter]), name='...')"
                )

    def lacks(self, optimizer: Optimizer) -> bool | None:
        """Tell whether no snapshot has an optimizer's state; None where it updates no model here.

        It may share the state of a registered one that it is a part of, or be kept by the script.
        """
        known = {id(p) for model in self.models.values() for p in model.parameters()}
        if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            return None
        has_state = any(optimizer.state is one.state for one in self.optimizers)
        for kept in self.others.values():
            parts = getattr(kept, "__dict__", {}).values()
            has_state |= kept is optimizer or any(part is optimizer for part in parts)
        return not has_state

    def has_unknown_scheduler(self) -> bool:
        """Tell whether a scheduler of torch's changes an optimizer's rates, and isn't known here.

        Where the script keeps objects of its own, one of them may hold it.
        """
        known = {id(getattr(scheduler, "optimizer", None)) for scheduler in self.schedulers}
        plain = KeptValues | Loader
        keeps_objects = not all(isinstance(kept, plain) for kept in self.others.values())
        scheduled = [o for o in self.optimizers if hasattr(o.step, "_wrapped_by_lr_sched")]
        return not keeps_objects and any(id(optimizer) not in known for optimizer in scheduled)

    def unknown_schedulers(self) -> list[LRScheduler]:
        """Find schedulers of the optimizers here that no snapshot has. Local.

        Goes through all objects of the process: for rare moments.

        Those that a loop makes for itself, such as a warm-up in the first epoch.
        """
        held = find_held([*self.schedulers, *self.others.values()], LRScheduler)
        known = {id(scheduler) for scheduler in held}
        return [
            one
            for one in gc.get_objects()
            if issubclass(type(one), LRScheduler)
            and id(one) not in known
            and any(vars(one).get("optimizer") is optimizer for optimizer in self.optimizers)
        ]

    def have_synced_batchnorm(self) -> bool:
        """Tell whether a model has PyTorch's own SyncBatchNorm: its forward pass is collective."""
        return any(isinstance(layer, nn.SyncBatchNorm) for layer in self.model.modules())

    def stateful(self) -> dict[str, Stateful]:
        """Name everything with a state besides models and optimizers."""
        numbered = {f"scheduler-{i}": s for i, s in enumerate(self.schedulers)}
        return {**numbered, **self.others}

    def encoded_states(self, tensors: dict[str, Tensor]) -> dict[str, object]:
        """Give the state that snapshots have of each of these, by name, as JSON.

        Args:
            tensors: Is given those in it.
        """
        before = {} if self.behind_batches is None else self.behind_batches.states
        found = dict[str, object]()
        for name, one in self.stateful().items():
            if name in before:
                found[name], named = before[name]
                tensors |= named
            else:
                found[name] = encode(one.state_dict(), name, tensors)
        return found

    def options_to_save(self) -> AbstractContextManager[None]:
        """Give the optimizers, for a block, the options that snapshots have. Local."""
        return nullcontext() if self.behind_batches is None else self.behind_batches.in_options()

    def schedule_state(self) -> list[object]:
        """Give what a step of a learning-rate schedule changes."""
        rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        return [*map(float, rates), *(scheduler.last_epoch for scheduler in self.schedulers)]

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Name the parameters of all models, as snapshots do."""
        return dict(self.model.named_parameters())

    def frozen(self) -> list[str]:
        """Name the parameters that the script has frozen, as it stands."""
        return [name for name, p in self.named_parameters().items() if not p.requires_grad]

    def restore_frozen(self, frozen: Collection[str]) -> tuple[list[str], list[str]]:
        """Freeze these parameters and no others. Local to the worker.

        Returns:
            Names of those that are thawed by it, and of those that are frozen by it.
        """
        thawed, refrozen = list[str](), list[str]()
        for name, parameter in self.named_parameters().items():
            if parameter.requires_grad is (name in frozen):
                parameter.requires_grad_(name not in frozen)
                (refrozen if name in frozen else thawed).append(name)
        return thawed, refrozen

    def restore_optimizer(
        self,
        optimizer: Optimizer,
        slots: Mapping[str, Tensor],
        saved: Mapping[str, object],
        kept_names: Sequence[str],
    ) -> None:
        """Give an optimizer a state that `flatten_optimizer` took apart. Local to the worker.

        Args:
            kept_names: Options of its groups that stay as they are: what the user asks for now
                holds, also where it differs from the snapshot's.
        """
        kept = [{n: group[n] for n in kept_names if n in group} for group in optimizer.param_groups]
        named = self.model.named_parameters()
        restore_optimizer(optimizer, named, slots, saved, adds_groups=True)
        # Groups that came while it trained are behind those that the script has made.
        for group, options in zip(optimizer.param_groups, kept, strict=False):
            group.update(options)

    def drop_gradients(self) -> None:
        """Drop the gradients of all models."""
        for model in self.models.values():
            model.zero_grad(set_to_none=True)


@final
@dataclass(frozen=True, kw_only=True)
class Reload:
    """Puts the tensors of the snapshot that was gone back to in place once more. Local."""

    weights: Callable[[], bool]
    """Tells whether one was another."""
    optimizers: Callable[[], None]


@final
@dataclass(frozen=True)
class ResumedState:
    """What a snapshot that was taken within an epoch has brought."""

    loop: LoopState
    slots: Sequence[tuple[int, int]]
    """Which tensors the optimizers had, and in which version."""
    reload: Reload | None


def place_model(module: nn.Module, options: ComputeOptions, group: Group) -> nn.Module:
    """Bring a module to the group's device, normalising as the options ask for.

    Parameters stay the objects they are. Only a module that is itself a BatchNorm is replaced.

    Raises:
        UsageError: The same bits are asked for, and a layer can't give them there; or the workers
            would come to have other weights.
    """
    _refuse_uninitialised(module)
    if group.world_size > 1:
        _refuse_renormalising(module)
    if features(group.device).has_nondeterministic and refuses_nondeterministic():
        refuse_nondeterministic(module)
    module.to(group.device)
    if options.sync_batchnorm and group.world_size > 1:
        by_sum = group.has_few_operations or group.backend == "gloo"
        return synchronise_batchnorm(module, group.device, by_sum=by_sum)
    return module


def _refuse_uninitialised(module: nn.Module) -> None:
    """Refuse lazy layers without shapes: their weights can't be made equal on all workers."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape before the model's first forward pass (a lazy layer): pass a "
                "batch through the model before s.model(...) or s.prepare(...): "
                "model(next(iter(train))[0])"
            )


def _refuse_renormalising(module: nn.Module) -> None:
    """Refuse layers whose forward pass changes their weights by this worker's samples alone."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise UsageError(
                f"{name or type(layer).__name__} has max_norm={layer.max_norm}: its forward pass "
                "rescales the rows that this worker's samples use, so that the workers' weights "
                "would differ. Leave max_norm out, and rescale all rows behind the update: "
                "weight.data.copy_(torch.renorm(weight.data, 2, 0, max_norm))"
            )


def forward_of(
    module: nn.Module, options: ComputeOptions, group: Group, *, exact: bool
) -> Forward | None:
    """Wrap a model's forward pass by the options: compiled, under autocast. None: unchanged.

    Args:
        options: Of which `compile`, `compile_mode` and `precision` count.
        group: The workers.
        exact: The same bits are promised on any number of them.
    """
    forward = None
    if options.compile:
        cuts = cuts_at_buckets(options, group, exact=exact)
        forward = compile_forward(module, options.compile_mode, in_buckets=cuts)
    if options.precision != "fp32":
        in_half = autocast(options.precision, group.device)
        forward = upcast_outputs(forward or module.forward, in_half)
    return forward


def compile_forward(
    module: nn.Module, mode: CompileMode | None = None, *, in_buckets: bool = False
) -> Forward:
    """Give a module's forward pass, compiled by torch.compile at its first use.

    Args:
        module: Computes the forward pass.
        mode: Of torch.compile.
        in_buckets: Cut the graph where buckets of gradients end, so that these can leave while the
            backward pass goes on: of one graph all gradients come at its end.
    """
    _note_compiling()
    forward: Forward = torch.compile(module.forward, mode=mode)
    if not in_buckets:
        return forward

    # torch cuts what it compiles within DistributedDataParallel's forward pass. Ours compiles
    # before, in the local pass that shows which parameters get a gradient.
    @wraps(forward)
    def cut(*args: object, **kwargs: object) -> object:
        """Have torch believe that a DistributedDataParallel's forward pass is running."""
        outer = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = outer or _DEFAULT_BUCKETS  # type: ignore[assignment]  # only its size is read
        try:
            return forward(*args, **kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = outer

    return cut


@cache
def _note_compiling() -> None:
    """Report compilation to the watchdog as the current operation: it may take minutes."""
    from torch._dynamo.callback import CallbackArgs, on_compile_end, on_compile_start

    before: list[str] = []

    def begin(_: CallbackArgs) -> None:
        before.append(note.operation)
        note.operation = COMPILING

    def end(_: CallbackArgs) -> None:
        note.operation = before.pop()

    on_compile_start(begin)
    on_compile_end(end)


_DEFAULT_BUCKETS = SimpleNamespace(bucket_bytes_cap=25 << 20)
"""Stands for a DistributedDataParallel with its usual buckets."""


def cuts_at_buckets(options: ComputeOptions, group: Group, *, exact: bool) -> bool:
    """Tell whether a compiled model's gradients should come bucket by bucket. Pure.

    Args:
        options: Whether anything is compiled.
        group: On one worker nothing leaves; on CPUs the exchange competes with the backward pass
            for the same cores, and the bits of trainings begun before stay.
        exact: The same bits are promised on any number of workers.
    """
    apart = group.world_size > 1 and is_accelerator(group.device)
    return options.compile and apart and not exact


def autocast(
    precision: Precision, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Give the context of a forward pass in this precision."""
    if precision == "fp32":
        return nullcontext
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    return lambda: torch.autocast(device.type, dtype=dtype)


def upcast_outputs(
    forward: Forward, context: Callable[[], AbstractContextManager[object]]
) -> Forward:
    """Run a forward pass under autocast, and give its half-precision outputs as fp32.

    So that a loss computed outside is as exact as one computed inside.
    """

    def run(*args: object, **kwargs: object) -> object:
        with context():
            outputs = forward(*args, **kwargs)
        return map_tensors(outputs, _upcast)

    return run


def _upcast(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
