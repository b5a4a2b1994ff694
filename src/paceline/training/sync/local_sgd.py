"""Local steps in a training: full averages first, then each worker on its own, one again at the
end of each pass over the training data."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from paceline.checkpoint.flatten import flatten_optimizer
from paceline.checkpoint.state_encoding import encode
from paceline.errors import SnapshotError, UsageError
from paceline.gradient_sync.local_sgd.averaging import LocalState, LocalSteps
from paceline.gradient_sync.local_sgd.layout import has_gaps
from paceline.gradient_sync.local_sgd.schedule import LocalTerms
from paceline.training.engine import Engine
from paceline.training.snapshots.per_worker_states import OwnState, gather_states
from paceline.training.snapshots.script_state import Stateful
from paceline.training.sync.base import ON_AVERAGE, StepSync, SyncState
from paceline.training.sync.optimizer_averaging import OptimizerMean, mean_state
from paceline.training.sync.validation import may_choose, method_of, warmup_steps

_WORKERS = "worker-"


@final
class LocalSync(StepSync):
    """Lets the workers train on their own, and averages their weights.

    Rounds of local steps begin where all workers are alike: with the end of the warm-up, and with
    each pass over the training data. What is due is settled by the step alone.
    """

    def __init__(self, engine: Engine, terms: LocalTerms) -> None:
        """Connect the workers for averages, and start a thread that `release` ends. Collective.

        Args:
            engine: Of the training.
            terms: How the weights become one.

        Raises:
            UsageError: The backend can't carry what is asked for.
        """
        self._engine = engine
        self._terms = terms
        self._local = LocalSteps(terms, engine.group, engine.parts.named_parameters)
        self._optimizers = OptimizerMean(engine.group)
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

    def begin(self, step: int) -> None:
        """See `StepSync`. Local to the worker; the first round begins with the pass."""
        self._warmup_steps = self._settle_warmup()
        self._is_alone = step >= self._warmup_steps
        if self._is_alone:
            self._set_alone()
        self._say_what_differs()

    def begin_pass(self) -> None:
        """See `StepSync`. Local to the worker."""
        if self._is_alone and not self._local.is_apart:
            self._local.start()

    def after_step(self, step: int) -> None:
        """See `StepSync`. Collective where an average is sent or due."""
        if self._is_alone:
            in_epoch = self._engine.course.state.step_in_epoch
            self._local.after(min(in_epoch, step - self._warmup_steps))
        elif step >= self._warmup_steps:  # each worker goes on alone
            self._is_alone = True
            self._set_alone()
            self._local.start()

    def consensus(self) -> bool:
        """See `StepSync`: weights and optimizers' states become their means."""
        if not self._local.is_apart:
            return False
        self._local.agree()
        parameters = self._engine.parts.named_parameters()
        for optimizer in self._engine.parts.optimizers:
            self._optimizers.agree(optimizer, parameters)
        self._agree_on_scale()
        return True

    def lent(self) -> AbstractContextManager[None]:
        """See `StepSync`."""
        self._heed_step()
        return self._local.lent()

    def gathered(self) -> SyncState:
        """See `StepSync`. Collective; a copy of every worker's own state travels to all others."""
        self._heed_step()
        saved = self._local.state()
        if not self._local.is_apart:
            return SyncState(tensors=saved.shared)
        keeps = self._engine.keeper.writes
        states = gather_states(self._engine.group, self._own(saved), keeps=keeps)
        with self._local.lent():
            model = self._weights() if keeps else {}
        if not keeps:
            return SyncState()
        tensors = dict(saved.shared)
        for rank, state in enumerate(states):
            tensors |= {f"{_worker(rank)}{name}": t for name, t in state.tensors.items()}
        scalers = [_mapping(state.values["scaler"]) for state in states]
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
                for number in range(len(self._engine.parts.optimizers))
            ],
            scaler=min(scalers, key=lambda scaler: float(str(scaler.get("scale", 0)))),
        )

    def restore(self, state: SyncState, world_size: int) -> str:
        """See `StepSync`. Local to the worker."""
        shared = {n: t for n, t in state.tensors.items() if not n.startswith(_WORKERS)}
        of_round, rank = _mapping(state.values.get("round", {})), self._engine.group.rank
        same = world_size == self._engine.group.world_size
        same = same and state.values.get("warmup_steps") == self._settle_warmup()
        if not (of_round and same and self._local.fits(of_round)):
            self._local.restore(LocalState(shared=shared, own={}, values={}))
            return ON_AVERAGE if of_round else ""
        workers, start = state.values["workers"], _worker(rank)
        assert isinstance(workers, list)
        own = OwnState(
            tensors={
                n.removeprefix(start): t for n, t in state.tensors.items() if n.startswith(start)
            },
            values=_mapping(workers[rank]),
        )
        self._local.restore(LocalState(shared=shared, own=dict(own.tensors), values=dict(of_round)))
        for number, optimizer in enumerate(self._engine.parts.optimizers):
            found = _optimizer_of(own, number)
            self._engine.keeper.restore_optimizer(optimizer, found.tensors, found.values)
        if self._scaler is not None:
            self._scaler.load_state_dict(dict(_mapping(own.values["scaler"])))
        return ""

    def release(self) -> None:
        """See `StepSync`."""
        self._local.release()

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return self._engine.keeper.scaler

    def _heed_step(self) -> None:
        """Within a step the script may have moved this worker's weights already."""
        if self._is_alone and self._engine.batch is not None:
            self._local.moved()

    def _settle_warmup(self) -> int:
        return warmup_steps(self._engine.config, self._engine.course.steps_per_epoch)

    def _set_alone(self) -> None:
        method = method_of(self._engine.config)
        self._engine.profiler.begin_method("local" if method == "auto" else method)
        for replica in self._engine.stepper.replicas:
            replica.alone = True

    def _say_what_differs(self) -> None:
        """Tell the user once what may be expected otherwise. Rank 0."""
        engine, plan = self._engine, self._terms.plan
        if engine.group.rank != 0:
            return
        steps = engine.course.steps_per_epoch
        if steps is not None and plan.every > steps:
            outer = "" if self._terms.is_plain else ", by their mean alone: without an outer step"
            engine.console.say(
                f"--sync-every {plan.every} is more than the {steps} steps of an epoch: what isn't "
                f"averaged within it is averaged at its end{outer}"
            )
        own = [n for n, part in engine.parts.others.items() if _has_numbers(part, n)]
        if own and engine.group.world_size > 1:
            engine.console.say(
                f"{', '.join(own)}, given to s.keep, holds tensors that follow each worker's own "
                "weights: they aren't averaged, and snapshots hold those of the worker that writes"
            )

    def _own(self, saved: LocalState) -> OwnState:
        """Put together what a snapshot needs of this worker."""
        parameters = self._engine.parts.named_parameters()
        tensors, values = dict(saved.own), []
        for number, optimizer in enumerate(self._engine.parts.optimizers):
            slots, plain = flatten_optimizer(optimizer, parameters.items())
            tensors |= {f"{_optimizer(number)}{name}": slot for name, slot in slots.items()}
            values.append(plain)
        scaler = {} if self._scaler is None else self._scaler.state_dict()
        return OwnState(tensors=tensors, values={"optimizers": values, "scaler": scaler})

    def _weights(self) -> dict[str, Tensor]:
        """Copy the parameters under all their names."""
        every = self._engine.parts.model.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().clone() for name, parameter in every}

    def _agree_on_scale(self) -> None:
        """Go on with the smallest of the workers' loss scales: it overflows on none of them."""
        if self._scaler is None:
            return
        state = dict(self._scaler.state_dict())
        names = ("scale", "_growth_tracker")
        own = torch.tensor([float(state[name]) for name in names], dtype=torch.float64)
        scale, tracker = self._engine.group.gather_rows(own).amin(0).tolist()
        self._scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(tracker)})


def make_local(engine: Engine, terms: LocalTerms) -> LocalSync | None:
    """Have the workers train on their own; None where a single one has nothing to average.

    Collective.

    Raises:
        UsageError: The backend can't carry what is asked for, or somebody compares the workers'
            steps.
    """
    if engine.watcher is not None:
        raise UsageError(
            "with --sync local or diloco each worker has weights of its own for some steps, so "
            "that there is nothing to verify: leave --sync out to verify all the rest"
        )
    engine.stepper.counts_batches = True
    if engine.group.world_size == 1 and terms.is_plain:
        return None
    made = LocalSync(engine, terms)
    engine.profiler.begin_averaging(made)
    return made


def can_be_local(engine: Engine) -> bool:
    """Tell whether `make_local` would do, for one who may choose it. Local to the worker."""
    parameters = engine.parts.named_parameters().values()
    return (
        may_choose(engine.config, "local")
        and engine.watcher is None
        and not engine.stepper.has_stepped_alone
        and not any(has_gaps(parameter) for parameter in parameters)
    )


def _has_numbers(part: Stateful, name: str) -> bool:
    """Tell whether a part has tensors that training may change: not a loader's state."""
    tensors: dict[str, Tensor] = {}
    encode(part.state_dict(), name, tensors)
    return any(tensor.is_floating_point() for tensor in tensors.values())


def _worker(rank: int) -> str:
    return f"{_WORKERS}{rank}/"


def _optimizer(number: int) -> str:
    return f"optimizer-{number}/"


def _optimizer_of(state: OwnState, number: int) -> OwnState:
    start = _optimizer(number)
    every = state.values["optimizers"]
    assert isinstance(every, list)
    return OwnState(
        tensors={n.removeprefix(start): t for n, t in state.tensors.items() if n.startswith(start)},
        values=_mapping(every[number]),
    )


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise SnapshotError("the snapshot's state of --sync isn't complete")
    return value
