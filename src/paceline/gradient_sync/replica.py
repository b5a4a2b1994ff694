"""A model on every worker whose gradients are averaged over all of them.

The user's module stays the object it is, with its own attributes and names; only its `forward`
goes through DistributedDataParallel.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.device import is_accelerator
from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.gradient_sync.bucket_overlap import BucketAverager, BucketOverlap
from paceline.gradient_sync.buckets import (
    Arrivals,
    are_trained,
    gradient_is_gone,
    gradients_of,
    set_gradients,
)
from paceline.gradient_sync.compression import Compression
from paceline.gradient_sync.name_list import list_names
from paceline.gradient_sync.network_model import ring_bytes
from paceline.gradient_sync.node_average import NodeAverage
from paceline.gradient_sync.replica_consistency import agree_on_weights

Forward = Callable[..., object]


class Averager(Protocol):
    """Interface of what averages gradients instead of DistributedDataParallel."""

    def average_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace gradients by what all workers' come to. Collective.

        Args:
            gradients: Of one model, by parameter, in the same order on all workers: this worker's,
                weighted so that their mean over the workers is that over the global batch. With a
                loss scaler they are multiplied by its scale, and inf and NaN have to come out on
                every worker, so that all leave the step out.
        """

    def wire_bytes(self, tensors: Sequence[Tensor]) -> float:
        """Count what one worker sends for gradients of these parameters, in bytes. Local."""


@final
class Replica:
    """Averages a module's gradients over the workers while its backward pass runs, or after it.

    The first backward pass of a process stays local: it shows which parameters get a gradient at
    all (`finish_backward`). Buffers (BatchNorm's running statistics) stay each worker's own while
    training; who uses the model averages them. Broadcasting them before every forward pass,
    DistributedDataParallel's default, would keep rank 0's alone and cost one more collective.
    One object, since every field says something about the backward pass under way: who averages
    it, what it has reached, and what may leave.
    """

    def __init__(self, module: nn.Module, group: Group, forward: Forward | None = None) -> None:
        """Wrap a module. Collective: all workers get rank 0's weights.

        Args:
            module: On the group's device; its `forward` is replaced.
            group: The workers.
            forward: What a forward pass computes; the module's own `forward` by default.

        Raises:
            JobError: The workers' modules differ in their parameters.
        """
        self.module = module
        self._syncing = True
        self.used = False
        """Whether the next backward pass that reaches the module will average its gradients."""
        self._has_reported_unused = False
        self._group = group
        self.compression: Compression | None = None
        """What gradients travel in; by default they do as they are. To be set before any does."""
        self._averager: Averager | None = None
        self._alone = group.world_size == 1
        self._arrivals = Arrivals[str]({})
        """Parameters that backward passes have reached, where deferred, and that aren't counted
        yet."""
        self._reached: Counter[str] = Counter()
        """Parameters that backward passes have reached since the last averaging; how often the last
        pass, which averages, did."""
        self._departures: BucketOverlap | None = None
        """Where gradients can leave during the backward pass."""
        self._has_looked_at_a_pass = False
        """Whether it is known if they can."""
        # DistributedDataParallel wraps `_Body`, not the module: its attributes and names stay as
        # they are.
        self._body = _Body(module, forward or module.forward)
        self._every = list(module.parameters())
        self._parallel: DistributedDataParallel | None = None
        self._partly = False
        """Whether a parameter may go without a gradient in some step."""
        self._settled = False
        """Whether a backward pass has shown which parameters get a gradient."""
        self._take_parameters()
        agree_on_weights(module, group)
        if group.world_size > 1 or forward is not None:
            module.forward = _Router(self, module.forward)
            vars(module)["__getstate__"] = _PlainState(module)

    @property
    def syncing(self) -> bool:
        """Whether the next backward pass averages; False while micro-batches are added up."""
        return self._syncing

    @syncing.setter
    def syncing(self, syncing: bool) -> None:
        self._count_arrivals(starts=False)
        self._syncing = syncing

    def defer_to(self, averager: Averager | None) -> None:
        """Average gradients by an `Averager` instead of DistributedDataParallel.

        To be called alike on all workers, between two steps.

        Args:
            averager: What does so: after the backward pass; a `BucketAverager` during it, once a
                pass has shown that every parameter gets one gradient. None:
                DistributedDataParallel again.
        """
        self._averager = averager
        # What is trained may have changed since: frozen by the script, or by a snapshot.
        self._take_parameters()

    @property
    def wire_bytes(self) -> float:
        """What one worker sends for each averaging, in bytes."""
        if self._alone:
            return 0.0
        workers, tensors = self._group.world_size, list(self.parameters.values())
        if self._averager is not None:
            return self._averager.wire_bytes(tensors)
        if self.compression is not None:
            return self.compression.wire_bytes(tensors, workers)
        return ring_bytes(sum(tensor.nbytes for tensor in tensors), workers)

    def run(self, *args: object, **kwargs: object) -> object:
        """Compute a forward pass; what `module(...)` comes down to."""
        # Nothing to average: a micro-batch that is only accumulated, an evaluation, a frozen model.
        if not self.syncing or not torch.is_grad_enabled() or self._is_frozen():
            return self._body.compute(*args, **kwargs)
        # Before the first averaging, and with an averager of our own, gradients stay local for now.
        if self._parallel is None:
            self._count_arrivals(starts=False)
            self.used = self._averager is not None
            return self._body.compute(*args, **kwargs)
        self.used = True
        return self._parallel(*args, **kwargs)

    def finish_backward(self) -> tuple[str, ...]:
        """Make sure after a backward pass that its gradients are those of all workers.

        Almost always they are already, and this only looks. Collective where they are not: after
        the first backward pass, and after one that used the module by another way than calling it
        (a method, a submodule), which DistributedDataParallel doesn't see.

        Returns:
            After the first backward pass: names of parameters that no worker has a gradient for.

        Raises:
            JobError: This worker got no gradient for parameters that had one before.
        """
        if self._averager is not None:
            return self._average(self._averager)
        # Nothing is averaged: only say, once, which parameters get no gradient.
        if self._alone:
            return () if self._has_reported_unused else self._find_unused()
        if self._is_frozen():
            return ()
        held = [p.grad is not None for p in self.parameters.values()]
        # The forward pass went through DistributedDataParallel, which has averaged already.
        if self.used:
            if any(held):  # else this backward pass was about another model, and ours may follow
                self.used = False
                if not self._partly and not all(held):
                    raise self._lost_gradients(held)
            return ()
        # It did not: the gradients are still this worker's own.
        without = self._compare(held)
        return () if without is None else self._catch_up(without)

    def reset(self) -> None:
        """Count nothing of the backward passes since the last averaging. Collective."""
        self.syncing = True
        self._reached.clear()
        self._recall()
        self.used = False

    def _catch_up(self, without: list[str]) -> tuple[str, ...]:
        """Average gradients that came by without DistributedDataParallel. Collective."""
        if self._parallel is not None:
            self._replay(without)
            return ()
        # A forward pass that never meets a backward pass would leave gradients waiting.
        self._parallel = _parallel(self._body, self._group.device, partly=self._partly)
        if self.compression is not None:
            self.compression.attach(self._parallel)
        self._replay(without, twice=not self._partly)
        return tuple(without)

    def _average(self, averager: Averager) -> tuple[str, ...]:
        """Average what the last backward passes have left in the parameters. Collective."""
        if self._is_frozen():
            return ()
        # Which parameters have a gradient on some worker; all workers agree on it.
        self._count_arrivals()
        held = list(map(self._reached.__contains__, self.parameters))
        if isinstance(averager, NodeAverage) and not self._settled and self._any_sparse():
            self.defer_to(None)
            return self.finish_backward()
        reached = dict(self._reached)
        self._reached.clear()
        was_settled, without = self._settled, self._without(held)
        if without is None:
            return ()  # it was about another model
        self._fill_gradients(without, reached)
        # Wait for the buckets that left during the backward pass, or send everything now.
        if self._departures is not None and not without:
            averages = self._departures.finish()
            set_gradients(map(self.parameters.__getitem__, averages), averages.values())
        else:
            self._recall()
            named = self.parameters.items()
            averager.average_(
                {n: p.grad for n, p in named if n not in without and p.grad is not None}
            )
        # Buckets may leave during backward passes once one has given every parameter a gradient.
        is_first = not self._has_looked_at_a_pass and not self._partly
        if is_first and isinstance(averager, BucketAverager):
            self._prepare_departures(averager, reached)
        return () if was_settled else tuple(without)

    def _fill_gradients(self, without: list[str], reached: Mapping[str, int]) -> None:
        """Give zeros to parameters that have a gradient on other workers alone.

        Args:
            without: Parameters that no worker has a gradient for.
            reached: Those that have got one here.

        Raises:
            UsageError: A gradient that had come is gone.
        """
        if gradients_of(self.parameters.values()) is not None:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is None and name not in without:
                if self._departures is not None and name in reached:
                    raise gradient_is_gone(name)
                parameter.grad = torch.zeros_like(parameter)

    def _any_sparse(self) -> bool:
        """Learn whether a worker has a sparse gradient. Collective."""
        grads = [parameter.grad for parameter in self.parameters.values()]
        own = any(grad is not None and grad.is_sparse for grad in grads)
        return bool(self._group.gather_rows(torch.tensor([own], dtype=torch.uint8)).any())

    def _prepare_departures(self, averager: BucketAverager, reached: Mapping[str, int]) -> None:
        """Prepare to send gradients in backward passes. Collective.

        Args:
            averager: What averages them.
            reached: Parameters in the order in which the last pass reached them, and how often.
        """
        self._has_looked_at_a_pass = True
        if self._alone or self._group.has_few_operations:
            return
        # A gradient that is added to twice would leave incomplete: all workers have to agree.
        once = set(reached.values()) == {1}
        if self._group.gather_rows(torch.tensor([once], dtype=torch.uint8)).all():
            averager.open_stream(self._group.device)
            self._departures = BucketOverlap(averager, self.parameters)
            self._arrivals.look(self._count_arrivals, self._departures.looks_at(list(reached)))

    def _recall(self) -> None:
        """Take back what has left during a backward pass. Collective."""
        if self._departures is not None:
            self._departures.discard()

    def _without(self, held: Sequence[bool]) -> list[str] | None:
        """Say which parameters no worker has a gradient for. Collective where that may change.

        Returns:
            Their names; None where there are no others.
        """
        if not self.used or not self._settled or self._partly:
            self.used = False
            return self._compare(held)
        if not any(held):
            return None
        self.used = False
        if not all(held):
            raise self._lost_gradients(held)
        return []

    def _compare(self, held: Sequence[bool]) -> list[str] | None:
        """Learn which parameters the workers have a gradient for. Collective.

        Returns:
            Names of those that no worker has one for; None where there are no others.
        """
        # (workers, parameters)
        rows = self._group.gather_rows(torch.tensor(held, dtype=torch.uint8)).bool()
        if not rows.any():
            return None
        if not self._settled:
            self._partly, self._settled = not bool(rows.all()), True
        return [n for n, has in zip(self.parameters, rows.any(0).tolist(), strict=True) if not has]

    def _watch(self) -> None:
        """Note which parameters a backward pass reaches, where that isn't otherwise known."""
        self._arrivals.release()
        self._arrivals = Arrivals(self.parameters if self._averager is not None else {})
        self._reached.clear()
        self._departures, self._has_looked_at_a_pass = None, False

    def _count_arrivals(self, *, starts: bool = True) -> None:
        """Count what was reached since the last time.

        Args:
            starts: Whether what is complete leaves. Outside a backward pass nothing does: the
                script may have dropped these gradients since.
        """
        names = self._arrivals.take()
        if not names:
            return
        if self._syncing:
            self._reached.update(names)
        else:
            for name in names:
                self._reached.setdefault(name, 0)
        if self._departures is not None and self._syncing and self.used:
            self._departures.arrive(names, starts=starts)

    def _find_unused(self) -> tuple[str, ...]:
        """Find unused parameters once, after the module's first backward pass."""
        without = [n for n, p in self.parameters.items() if p.grad is None]
        self._has_reported_unused = len(without) < len(self.parameters)
        return tuple(without) if self._has_reported_unused else ()

    def release(self) -> None:
        """Give the module its own forward pass back. Local to the worker."""
        for name in _OURS:
            vars(self.module).pop(name, None)
        self.defer_to(None)

    def _take_parameters(self) -> None:
        self.parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._trained = are_trained(self._every)
        self._parallel, self._partly, self.used = None, False, False
        self._settled = False
        self._watch()

    def _is_frozen(self) -> bool:
        """Tell whether nothing is trained now; notice what the script has frozen or thawed."""
        now = are_trained(self._every)
        # The usual case: nothing was frozen or thawed since the last step.
        if now == self._trained:
            return not self.parameters
        if not any(now):
            return True  # for a while: the discriminator in the generator's step
        self._take_parameters()
        return False

    def _replay(self, without: Sequence[str], *, twice: bool = False) -> None:
        """Send the local gradients through a backward pass that averages them. Collective.

        The sum of parameter * gradient has just these gradients, bit by bit.

        Args:
            without: Parameters that no worker has a gradient for; they stay without.
            twice: DistributedDataParallel puts its buckets into another order after the first
                backward pass, and their order settles how sums are rounded. Run that one for
                nothing, so that every start of a training rounds alike from its first step on.
        """
        parallel, local = self._parallel, self._take_gradients()
        assert parallel is not None
        # Averaged by DistributedDataParallel's own hooks, as in every later step.
        for _ in range(1 + twice):
            set_gradients(self.parameters.values())
            with torch.autocast(self._group.device.type, enabled=False):
                parallel(_Surrogate(local)).backward()
        # DistributedDataParallel has filled these with zeros; an optimizer must not step them.
        for name in without:
            self.parameters[name].grad = None
        self.used = False

    def _take_gradients(self) -> dict[str, Tensor]:
        """Copy this worker's gradients; what has none contributes zero to the others'."""
        held = {n: (p, p.grad) for n, p in self.parameters.items()}
        return {n: torch.zeros_like(p) if g is None else g.clone() for n, (p, g) in held.items()}

    def _lost_gradients(self, held: Sequence[bool]) -> JobError:
        lost = [name for name, has in zip(self.parameters, held, strict=True) if not has]
        return JobError(
            f"{list_names(lost)} got no gradient in this step on rank {self._group.rank}, but did "
            "in the first step: the other workers wait for it. Use every parameter in every step, "
            "or give those that are left out a share of zero: loss + 0 * parameter.sum()"
        )


@final
class _Surrogate:
    """Stands for a forward pass whose gradients are known."""

    def __init__(self, gradients: Mapping[str, Tensor]) -> None:
        self.gradients = gradients


@final
class _Body(nn.Module):
    """What DistributedDataParallel wraps: the module's real forward pass, or a surrogate's."""

    def __init__(self, module: nn.Module, compute: Forward) -> None:
        super().__init__()
        self.module = module
        self.compute = compute

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the real forward pass, or compute a surrogate loss that has known gradients."""
        if args and isinstance(args[0], _Surrogate):
            gradients = args[0].gradients
            named = dict(self.module.named_parameters())
            # d/dp of sum(p * g) is g, for real numbers.
            pairs = [(_real(named[name]), _real(given)) for name, given in gradients.items()]
            terms = [(parameter * gradient).sum() for parameter, gradient in pairs]
            return torch.stack([term.float() for term in terms]).sum()
        return self.compute(*args, **kwargs)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@final
class _Router:
    """The `forward` of a module that has been taken over, with its signature."""

    def __init__(self, replica: Replica, forward: Forward) -> None:
        self._replica = replica
        update_wrapper(self, forward)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._replica.run(*args, **kwargs)


_OURS = ("forward", "__getstate__")
"""Attributes of a module that has been taken over, beside those of its class."""
_NEVER = 2**31 - 1
"""Iterations: the largest number that DDP takes."""


@final
class _PlainState:
    """A module's `__getstate__`: a copy of it, by torch.save or copy.deepcopy, has nothing of ours.

    Python looks it up on the object itself. The copy has the forward pass of its class, and can be
    loaded where there is no Paceline.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self) -> object:
        state = type(self._module).__getstate__(self._module)
        if not isinstance(state, dict):
            return state  # the class has a way of its own
        return {name: value for name, value in state.items() if name not in _OURS}


def _parallel(body: _Body, device: torch.device, *, partly: bool) -> DistributedDataParallel:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # `broadcast_buffers` became `forward_sync_buffers` in torch 2.13.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    ddp = DistributedDataParallel(
        body,
        device_ids=[device.index] if is_accelerator(device) else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        find_unused_parameters=partly,
        **{buffers: False},  # type: ignore[arg-type]  # its name depends on torch's version
    )
    # Its own statistics, which nobody reads, wait for the device in every hundredth forward pass.
    ddp._set_ddp_runtime_logging_sample_rate(_NEVER)
    return ddp
