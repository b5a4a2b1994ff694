"""`--sync local` and `diloco` in a training: averages every step first, then local steps.

Weights are averaged as well at the end of each pass over the training data."""

from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from paceline.checkpoint.flatten import flatten_optimizer
from paceline.checkpoint.state_encoding import encode, require_mapping
from paceline.data.batch import Batch
from paceline.errors import UsageError
from paceline.gradient_sync.local_sgd.averaging import LocalState, LocalSteps
from paceline.gradient_sync.local_sgd.layout import has_gaps
from paceline.gradient_sync.local_sgd.schedule import LocalTerms
from paceline.training.context import TrainingContext
from paceline.training.snapshots.per_worker_states import RankState, gather_states
from paceline.training.snapshots.script_state import Stateful
from paceline.training.sync.allreduce import AllReduceSync, ReplicaSync
from paceline.training.sync.base import ON_AVERAGE, GradientSync, SyncState
from paceline.training.sync.optimizer_averaging import OptimizerAverager, mean_state
from paceline.training.sync.validation import may_choose, method_of, warmup_steps

_WORKERS = "worker-"


@final
class LocalSync(ReplicaSync):
    """Lets the workers train on their own, and averages their weights.

    Rounds of local steps begin where all workers are alike: with the end of the warm-up, and with
    each pass over the training data. What is due is settled by the step alone.
    """

    def __init__(self, context: TrainingContext, terms: LocalTerms) -> None:
        """Connect the workers for averages, and start a thread that `close` ends. Collective.

        Args:
            context: Of the training.
            terms: Schedule and outer optimizer.

        Raises:
            UsageError: The backend can't carry what is asked for.
        """
        super().__init__(context)
        self._terms = terms
        self._local = LocalSteps(terms, context.group, context.components.named_parameters)
        self._optimizers = OptimizerAverager(context.group)
        self._warmup_steps = 0
        self._is_alone = False

    @property
    def waited_s(self) -> float:
        """How long this worker's steps have waited for averages of weights."""
        return self._local.waited_s

    @property
    def sent_bytes(self) -> float:
        """What it has sent for averages, of weights and of optimizers' states, on the wire."""
        return self._local.sent_bytes + self._optimizers.sent_bytes

    def setup(self, step: int) -> None:
        """Begin to train alone where the warm-up is over. Local; rounds begin with the pass."""
        self._warmup_steps = self._settle_warmup()
        self._is_alone = step >= self._warmup_steps
        if self._is_alone:
            self._set_alone()
        self._say_what_differs()

    def begin_step(self, step: int, batch: Batch | None) -> None:
        """Begin a round where none is under way. Local to the worker."""
        if self._is_alone and not self._local.is_apart:
            self._local.start()

    def after_step(self, step: int) -> None:
        """Send and apply averages where they are due. Collective then."""
        if self._is_alone:
            in_epoch = self.context.progress.state.step_in_epoch
            self._local.after(min(in_epoch, step - self._warmup_steps))
        elif step >= self._warmup_steps:  # each worker goes on alone
            self._is_alone = True
            self._set_alone()
            self._local.start()

    def end_epoch(self) -> bool:
        """Make weights and optimizers' states their means."""
        if not self._local.is_apart:
            return False
        self._local.agree()
        parameters = self.context.components.named_parameters()
        for optimizer in self.context.components.optimizers:
            self._optimizers.agree(optimizer, parameters)
        self._agree_on_scale()
        return True

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Put the average of all workers' weights into the models. Collective."""
        self._note_open_step()
        return self._local.averaged_weights()

    def state_dict(self) -> SyncState:
        """Collect every worker's own state: a copy of each travels to all others."""
        self._note_open_step()
        saved = self._local.state()
        if not self._local.is_apart:
            return SyncState(tensors=saved.shared)
        # Each worker's own weights and optimizers, for as many workers; their mean for others.
        keeps = self.context.writes
        states = gather_states(self.context.group, self._own(saved), keeps=keeps)
        with self._local.averaged_weights():
            model = self._weights() if keeps else {}
        if not keeps:
            return SyncState()
        tensors = dict(saved.shared)
        for rank, state in enumerate(states):
            tensors |= {f"{_worker(rank)}{name}": t for name, t in state.tensors.items()}
        scalers = [require_mapping(state.values["scaler"]) for state in states]
        return SyncState(
            tensors=tensors,
            values={
                "round": saved.values,
                "warmup_steps": self._warmup_steps,
                "workers": [dict(state.values) for state in states],
            },
            model=model,
            optimizers=[
                mean_state([_optimizer_of(state, number) for state in states])
                for number in range(len(self.context.components.optimizers))
            ],
            scaler=min(scalers, key=lambda scaler: float(str(scaler.get("scale", 0)))),
        )

    def load_state_dict(self, state: SyncState, world_size: int) -> str:
        """Put this worker's own state back, or go on from the average. Local to the worker."""
        shared = {n: t for n, t in state.tensors.items() if not n.startswith(_WORKERS)}
        of_round, rank = require_mapping(state.values.get("round", {})), self.context.group.rank
        # Workers' own weights fit only where there are as many, in the same rounds.
        same = world_size == self.context.group.world_size
        same = same and state.values.get("warmup_steps") == self._settle_warmup()
        if not (of_round and same and self._local.fits(of_round)):
            self._local.restore(LocalState(shared=shared, own={}, values={}))
            return ON_AVERAGE if of_round else ""
        # This worker's own: weights, optimizers, loss scale.
        workers, start = state.values["workers"], _worker(rank)
        assert isinstance(workers, list)
        own = RankState(
            tensors={
                n.removeprefix(start): t for n, t in state.tensors.items() if n.startswith(start)
            },
            values=require_mapping(workers[rank]),
        )
        self._local.restore(LocalState(shared=shared, own=dict(own.tensors), values=dict(of_round)))
        for number, optimizer in enumerate(self.context.components.optimizers):
            found = _optimizer_of(own, number)
            kept = self.context.kept_options
            self.context.components.restore_optimizer(optimizer, found.tensors, found.values, kept)
        if self.context.scaler is not None:
            self.context.scaler.load_state_dict(dict(require_mapping(own.values["scaler"])))
        return ""

    def close(self) -> None:
        """End the thread that sends averages."""
        self._local.release()

    def _note_open_step(self) -> None:
        """Within a step the script may have changed this worker's weights already."""
        if self._is_alone and self.context.step.batch is not None:
            self._local.moved()

    def _settle_warmup(self) -> int:
        return warmup_steps(self.context.config, self.context.progress.steps_per_epoch)

    def _set_alone(self) -> None:
        method = method_of(self.context.config)
        self.context.profiler.begin_method("local" if method == "auto" else method)
        for replica in self.replicas:
            replica.alone = True

    def _say_what_differs(self) -> None:
        """Tell the user once what may be expected otherwise. Rank 0."""
        context, plan = self.context, self._terms.plan
        if context.group.rank != 0:
            return
        steps = context.progress.steps_per_epoch
        if steps and plan.every > steps:  # a stream's are 0: nobody knows them
            outer = "" if self._terms.is_plain else ", by their mean alone: without an outer step"
            context.console.say(
                f"--sync-every {plan.every} is more than the {steps} steps of an epoch: what isn't "
                f"averaged within it is averaged at its end{outer}"
            )
        own = [n for n, one in context.components.others.items() if _has_numbers(one, n)]
        if own and context.group.world_size > 1:
            context.console.say(
                f"{', '.join(own)}, given to s.keep, holds tensors that follow each worker's own "
                "weights: they aren't averaged, and snapshots hold those of the worker that writes"
            )

    def _own(self, saved: LocalState) -> RankState:
        """Put together what a snapshot needs of this worker."""
        parameters = self.context.components.named_parameters()
        tensors, values = dict(saved.own), []
        for number, optimizer in enumerate(self.context.components.optimizers):
            slots, plain = flatten_optimizer(optimizer, parameters.items())
            tensors |= {f"{_optimizer(number)}{name}": slot for name, slot in slots.items()}
            values.append(plain)
        scaler = {} if self.context.scaler is None else self.context.scaler.state_dict()
        return RankState(tensors=tensors, values={"optimizers": values, "scaler": scaler})

    def _weights(self) -> dict[str, Tensor]:
        """Copy the parameters under all their names."""
        every = self.context.components.model.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().clone() for name, parameter in every}

    def _agree_on_scale(self) -> None:
        """Go on with the smallest of the workers' loss scales: it overflows on none of them."""
        if self.context.scaler is None:
            return
        state = dict(self.context.scaler.state_dict())
        names = ("scale", "_growth_tracker")
        own = torch.tensor([float(state[name]) for name in names], dtype=torch.float64)
        scale, tracker = self.context.group.gather_rows(own).amin(0).tolist()
        self.context.scaler.load_state_dict(
            {**state, "scale": scale, "_growth_tracker": int(tracker)}
        )


def make_local(context: TrainingContext, terms: LocalTerms | None = None) -> GradientSync:
    """Make the `LocalSync` of several workers; a single one has nothing to average. Collective.

    Args:
        context: Of the training.
        terms: Schedule and outer optimizer; by default as the options say.

    Raises:
        UsageError: The backend can't carry what is asked for, or somebody compares the workers'
            steps.
    """
    if context.hooks.needs_equal_weights:
        raise UsageError(
            "with --sync local or diloco each worker has weights of its own for some steps, so "
            "that there is nothing to verify: leave --sync out to verify all the rest"
        )
    context.optimizer_step.counts_batches = True
    settled = LocalTerms.of(context.config.sync) if terms is None else terms
    if context.group.world_size == 1 and settled.is_plain:
        return AllReduceSync(context)
    made = LocalSync(context, settled)
    context.profiler.begin_averaging(made)
    return made


def can_be_local(context: TrainingContext) -> bool:
    """Tell whether `make_local` would do, for one who may choose it. Local to the worker."""
    parameters = context.components.named_parameters().values()
    return (
        may_choose(context.config, "local")
        and not context.hooks.needs_equal_weights
        and not context.optimizer_step.has_stepped_alone
        and not any(has_gaps(parameter) for parameter in parameters)
    )


def _has_numbers(one: Stateful, name: str) -> bool:
    """Tell whether an object has tensors that training may change: not a loader's state."""
    tensors: dict[str, Tensor] = {}
    encode(one.state_dict(), name, tensors)
    return any(tensor.is_floating_point() for tensor in tensors.values())


def _worker(rank: int) -> str:
    return f"{_WORKERS}{rank}/"


def _optimizer(number: int) -> str:
    return f"optimizer-{number}/"


def _optimizer_of(state: RankState, number: int) -> RankState:
    start = _optimizer(number)
    every = state.values["optimizers"]
    assert isinstance(every, list)
    return RankState(
        tensors={n.removeprefix(start): t for n, t in state.tensors.items() if n.startswith(start)},
        values=require_mapping(every[number]),
    )
