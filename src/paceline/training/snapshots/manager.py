"""Collects a training's state, has it written in the background, and restores it."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import final

import torch
from torch import Tensor, nn

from paceline.checkpoint.flatten import flatten_optimizer
from paceline.checkpoint.format import Snapshot
from paceline.checkpoint.host_tensors import weights_sha256
from paceline.checkpoint.state_encoding import (
    decode,
    require_entry,
    require_list,
    require_mapping,
)
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.writer import SnapshotWriter
from paceline.data.order import ORDER_VERSION
from paceline.errors import NonFiniteLossError, SnapshotError
from paceline.gradient_sync.name_list import list_names
from paceline.launch.heartbeat import StepNote
from paceline.metrics.counters import StepCounters
from paceline.options.figures import plural
from paceline.training.components import Reload
from paceline.training.context import TrainingContext
from paceline.training.snapshots.discovery import best_weights, find_origin
from paceline.training.snapshots.model_weights import are_finite, load_weights
from paceline.training.snapshots.per_worker_states import RankState, gather_states, merged
from paceline.training.snapshots.script_state import same_values
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement
from paceline.training.sync.base import GradientSync, SyncState
from paceline.training.sync.validation import method_of


@final
class SnapshotManager:
    """Saves and restores a training's state. Rank 0 writes, or one worker of each node."""

    def __init__(
        self,
        context: TrainingContext,
        sync: GradientSync,
        counters: StepCounters,
        note: StepNote,
    ) -> None:
        """Create the snapshot manager.

        Args:
            context: Of the training; its models may still grow until the first snapshot.
            sync: Combines gradients; its state is saved as well.
            counters: The epoch's sums, saved as well.
            note: Where others see how long a snapshot takes.
        """
        self._store = SnapshotStore(context.run.snapshots, context.config.snapshots.keep_last)
        self._report = context.console.warn
        self._context = context
        self._method = method_of(context.config)
        self._group = context.group
        self._components = context.components
        self._buffer_averager = context.buffer_averager
        self._counters = counters
        self._sync = sync
        self._note = note
        self._writer: SnapshotWriter | None = None
        if context.writes:
            self._writer = SnapshotWriter(self._store, self._report, self._note_written)
        self._copied_s = 0.0
        self.restored: Mapping[str, object] = {}
        """JSON of the snapshot that was gone back to."""
        self._restored: Snapshot | None = None
        self._generation, self._start = 1, ""

    @property
    def written(self) -> int:
        """Snapshots that this worker has published."""
        return self._writer.written if self._writer else 0

    @property
    def skipped(self) -> int:
        """Snapshots left out because the one before was still being written."""
        return self._writer.skipped if self._writer else 0

    def save(
        self,
        state: TrainState,
        agreed: Agreement,
        *,
        best: bool,
        must: bool,
    ) -> None:
        """Copy the training's state and have it written in the background.

        Local to the worker, since what is needed of the others came with the exchange; collective
        where each worker has states of its own.

        Args:
            agreed: Of this step, with the statistics of all parts.
            best: Also keep it as the best by validation.
            must: Where the one before is still being written, wait for it rather than skip this.

        Raises:
            NonFiniteLossError: A weight is NaN or infinite; on every worker.
        """
        # What may be collective comes first, on workers without a writer as well.
        began_s = perf_counter()
        model, scaler = self._components.model, self._context.scaler
        named = list(model.named_parameters())  # once: walking the modules costs more than sums
        self._check_finite(named, state.step)
        own = self._gathered_own()
        with self._components.options_to_save():
            sync = self._sync.state_dict()
        if self._writer is None:
            self._note.snapshot_s = perf_counter() - began_s
            return
        # Tensors by group: models, optimizers, the script's own objects, the sync method, averages.
        tensors: dict[str, Mapping[str, Tensor]] = {
            "model": self._model_tensors(model, agreed.more),
            "workers": {"buffers": agreed.more},
        }
        with self._components.options_to_save():
            optimizers = self._optimizer_state(named, tensors)
        others: dict[str, Tensor] = {}
        saved = self._components.encoded_states(others)
        if others:
            tensors["others"] = others
        if sync.tensors:
            tensors["sync"] = dict(sync.tensors)
        if own.tensors:
            tensors["own"] = dict(own.tensors)
        tensors |= self._average_tensors()
        # The rest is JSON.
        of_hooks: dict[str, object] = {}
        for state_dict in self._context.hooks.state_dict:
            of_hooks |= state_dict()
        snapshot = Snapshot(
            step=state.step,
            tensors=tensors,
            state={
                "order": ORDER_VERSION,
                "position": state.to_json(),
                "frozen": self._components.frozen(),
                "counted": agreed.counted.tolist(),
                "optimizers": optimizers,
                "others": saved,
                "own": dict(own.values),
                "scaler": scaler.state_dict() if scaler else None,
                "sync": {"method": self._method, "values": dict(sync.values)},
                "world_size": self._group.world_size,
                "parts": self._context.division.parts,
                "numerics": None,  # unless a hook has it
                "generation": self._generation,
                "start": self._start,
                **of_hooks,
            },
        )
        self._writer.offer(snapshot, best=best, wait=must)
        self._copied_s = perf_counter() - began_s

    def restore_newest(self) -> TrainState | None:
        """Go back to the newest snapshot that verifies. Collective.

        See `find_origin`; damaged ones are set aside, and that is said.

        Returns:
            Where the training stands; None where there is no snapshot.

        Raises:
            SnapshotError: The snapshot doesn't fit this model or optimizer, or nodes have
                different ones.
        """
        if self._writer is not None:
            self._store.sweep()
        origin = find_origin(self._store, self._group, self._report, shared=self._context.shared)
        self._generation = origin.generation
        self._start = self._group.broadcast_text(secrets.token_hex(8))
        return None if origin.snapshot is None else self._restore(origin.snapshot)

    def load_best(self) -> bool:
        """Put the weights that the best snapshot was evaluated with into the model. Collective.

        Evaluations take these from then on.

        Returns:
            False where there is none.
        """
        model, group = self._components.model, self._group
        best = best_weights(self._store, group, self._report, shared=self._context.shared)
        if best is None:
            return False
        if group.rank == best.rank:
            load_weights(model, best.tensors)
        for tensor in model.state_dict().values():
            group.broadcast_(tensor.detach(), best.rank)
        self._components.average = None
        return True

    def advice(self) -> str:
        """Say what to do where a training has diverged, for an error message."""
        remedy = "Try a lower --lr, a warm-up or --clip-norm"
        steps = self._store.steps()
        if not steps:
            return f"No snapshot had been written yet. {remedy}"
        newest = f"The newest good snapshot is {self._store.path_of(steps[-1])}"
        return f"{newest}. {remedy}"

    def flush(self) -> None:
        """Wait until saved snapshots are on disk, or have failed (which was reported)."""
        if self._writer:
            self._writer.flush()

    def _note_written(self, seconds: float) -> None:
        self._note.snapshot_s = self._copied_s + seconds

    def _check_finite(self, named: Sequence[tuple[str, nn.Parameter]], step: int) -> None:
        """Check that the weights are finite.

        Raises:
            NonFiniteLossError: A weight is NaN or infinite; on every worker, as all have the same.
        """
        if not are_finite([parameter.detach() for _, parameter in named]):
            raise NonFiniteLossError(
                f"the weights became NaN or infinite by step {step}. {self.advice()}"
            )

    def _optimizer_state(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        tensors: dict[str, Mapping[str, Tensor]],
    ) -> list[object]:
        """Add each optimizer's tensors to those of the snapshot; returns its other values."""
        optimizers: list[object] = []
        for number, optimizer in enumerate(self._components.optimizers):
            slots, values = flatten_optimizer(optimizer, named)
            tensors[_optimizer_file(number)] = slots
            optimizers.append(values)
        return optimizers

    def save_last(self, limit_s: float, is_cut_short: Callable[[], bool]) -> str:
        """Wait as `flush`; where the last snapshot isn't on disk, try again for a while. Local.

        Args:
            is_cut_short: Asked before each further try: whether to give up.

        Returns:
            Why it couldn't be written; empty where it is on disk, or another worker's to write.
        """
        return self._writer.save_last(limit_s, is_cut_short) if self._writer else ""

    def snapshot_of(self, step: int) -> str | None:
        """Name the snapshot of a step; None where there is none. Local."""
        return self._store.path_of(step).name if step in self._store.steps() else None

    def close(self) -> None:
        """Flush, and end the writing thread."""
        if self._writer:
            self._writer.close()

    def fingerprint(self) -> str:
        """Hash the model's weights, with the running statistics averaged. Collective."""
        rows = self._buffer_averager.gathered()
        return weights_sha256(self._model_tensors(self._components.model, rows))

    def state_fingerprint(self) -> str:
        """Hash the rest: optimizers' state and the running statistics of all parts. Collective."""
        model = self._components.model
        tensors = {"buffers": self._buffer_averager.gathered()}
        for average in self._average_tensors().values():
            tensors |= {f"ema/{name}": tensor for name, tensor in average.items()}
        for number, optimizer in enumerate(self._components.optimizers):
            slots, values = flatten_optimizer(optimizer, model.named_parameters())
            tensors |= {f"{_optimizer_file(number)}/{name}": slot for name, slot in slots.items()}
            text = json.dumps(values, sort_keys=True).encode()
            tensors[f"{_optimizer_file(number)}/values"] = torch.tensor(list(text))
        return weights_sha256(tensors)

    def _average_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Give the average of the weights for a snapshot; empty where there is none."""
        average = self._components.average
        averages = average.tensors() if average is not None else {}
        return {"ema": averages} if averages else {}

    def _restore_average(self, snapshot: Snapshot) -> None:
        average, averages = self._components.average, snapshot.tensors.get("ema")
        if average is not None and averages:
            average.restore(averages)
        elif average is not None and snapshot.step:
            self._report("The snapshot has no average of the weights (--ema): it begins here")
        elif averages:
            self._report(
                "The snapshot has an average of the weights, and now none is kept (s.ema, --ema): "
                "from here on the trained weights are evaluated"
            )

    def _gathered_own(self) -> RankState:
        """Collect what each worker has a state of its own of. Collective where there is any."""
        per_part = self._components.per_part
        if not per_part.objects:
            return RankState(tensors={})
        states = gather_states(self._group, per_part.own(), keeps=self._writer is not None)
        tensors = {name: tensor for state in states for name, tensor in state.tensors.items()}
        return RankState(tensors=tensors, values=merged([state.values for state in states]))

    def _model_tensors(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        """Name the model's tensors, with the average of these statistics in place of its own."""
        tensors: dict[str, Tensor] = {k: v.detach() for k, v in model.state_dict().items()}
        return tensors | self._buffer_averager.averaged(rows)

    def _restore(self, snapshot: Snapshot) -> TrainState:
        state = snapshot.state
        if state.get("order") != ORDER_VERSION:
            raise SnapshotError(
                f"the snapshot counts samples in order {state.get('order')}, and this version of "
                f"Paceline has order {ORDER_VERSION}: resume with the version that wrote it"
            )
        # What every training has: weights and optimizers.
        load_weights(self._components.model, snapshot.tensors.get("model", {}))
        self._restore_optimizers(snapshot)
        self._restore_frozen(require_list(require_entry(state, "frozen")))
        # What the script has added: objects alike on all workers, then those of each shard.
        self._restore_others(
            require_mapping(require_entry(state, "others")), snapshot.tensors.get("others", {})
        )
        self._components.per_part.restore(
            require_mapping(require_entry(state, "own")),
            snapshot.tensors.get("own", {}),
            require_entry(state, "parts"),
            self._context.division.parts,
        )
        # What the options bring: loss scale, average of the weights, state of the sync method.
        scaler, saved_scaler = self._context.scaler, require_entry(state, "scaler")
        if scaler is not None and saved_scaler is not None:
            scaler.load_state_dict(dict(require_mapping(saved_scaler)))
        self._restore_own(snapshot)
        self._restore_average(snapshot)
        self._restore_sync(snapshot)
        self.restored = state
        position = TrainState.from_json(require_entry(state, "position"))
        self._restored = snapshot if position.step_in_epoch else None
        return position

    def take_reload(self) -> Reload | None:
        """Give what puts the tensors of the snapshot that was gone back to in place once more.

        None at an epoch's boundary. The snapshot's memory is kept as long as this is.
        """
        snapshot, self._restored = self._restored, None
        if snapshot is None:
            return None
        # Each worker's own, which aren't the snapshot's average of them; others are in no snapshot.
        saved = dict(snapshot.tensors.get("model", {}))
        for name, buffer in self._components.model.named_buffers():
            if name in saved:
                saved[name] = buffer.clone()
        return Reload(
            weights=partial(self._put_weights_back, saved),
            optimizers=partial(self._restore_optimizers, snapshot),
        )

    @torch.no_grad()
    def _put_weights_back(self, saved: Mapping[str, Tensor]) -> bool:
        found, parameters = False, self._components.named_parameters()
        for name, own in (*parameters.items(), *self._components.model.named_buffers()):
            if (tensor := saved.get(name)) is None or tensor.shape != own.shape:
                continue
            tensor = tensor.to(own.device, own.dtype)
            if not same_values(own, tensor):
                own.copy_(tensor)
                found = True
        return found

    def _restore_optimizers(self, snapshot: Snapshot) -> None:
        saved = require_list(require_entry(snapshot.state, "optimizers"))
        if len(saved) != len(self._components.optimizers):
            raise SnapshotError(
                f"the snapshot has {len(saved)} optimizers, the training "
                f"{len(self._components.optimizers)}"
            )
        for number, optimizer in enumerate(self._components.optimizers):
            slots = snapshot.tensors.get(_optimizer_file(number), {})
            kept_names = self._context.kept_options
            self._components.restore_optimizer(
                optimizer, slots, require_mapping(saved[number]), kept_names
            )

    def _restore_frozen(self, saved: Sequence[object]) -> None:
        """Freeze what was frozen in the snapshot, and nothing else: a loop may have thawed layers.

        What the script has set before the loop is that of the training's beginning.
        """
        thawed, refrozen = self._components.restore_frozen(set(map(str, saved)))
        changes = [
            f"{plural(len(names), 'parameter')} {'is' if len(names) == 1 else 'are'} {now} "
            f"({list_names(names)})"
            for names, now in ((thawed, "trained"), (refrozen, "frozen"))
            if names
        ]
        if changes and self._group.rank == 0:
            self._report(
                f"As in the snapshot {' and '.join(changes)}, other than the script had it before "
                "the loop. To change that set requires_grad within the loop"
            )

    def _restore_others(self, saved: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        objects = self._components.stateful()
        if saved.keys() != objects.keys():
            raise SnapshotError(
                f"the snapshot has the state of {', '.join(saved) or 'nothing'} besides models and "
                f"optimizers, the training has {', '.join(objects) or 'nothing'}"
            )
        for name, one in objects.items():
            one.load_state_dict(dict(require_mapping(decode(saved[name], tensors))))

    def _restore_sync(self, snapshot: Snapshot) -> None:
        """Give the way of combining gradients its state back; another one begins afresh."""
        now, saved = self._method, require_mapping(require_entry(snapshot.state, "sync"))
        values = require_mapping(require_entry(saved, "values"))
        method = require_entry(saved, "method")
        if method != now:
            self._report(
                f"The snapshot was written with --sync {method}; from here on it is "
                f"--sync {now}, which begins afresh"
            )
        else:
            tensors = snapshot.tensors.get("sync", {})
            state = SyncState(tensors=tensors, values=values)
            notice = self._sync.load_state_dict(
                state, int(str(require_entry(snapshot.state, "world_size")))
            )
            if notice:
                self._report(notice)

    def _restore_own(self, snapshot: Snapshot) -> None:
        """Give this worker's parts their statistics and sums back.

        With other parts (another number of workers without fixed shards) all go on from the
        average, and rank 0 carries the sums.
        """
        state, rank = snapshot.state, self._group.rank
        counted = torch.tensor(require_entry(state, "counted"), dtype=torch.float64)
        if require_entry(state, "parts") == self._context.division.parts:
            own_parts = self._context.division.parts_of(rank)
            self._buffer_averager.restore(snapshot.tensors["workers"]["buffers"])
            self._counters.reset(counted[own_parts.start : own_parts.stop])
            return
        # Other parts: buffers are averages in the snapshot; sums count once, on rank 0.
        self._buffer_averager.reset()
        self._counters.reset(counted.sum(0, keepdim=True) if rank == 0 else None)
        self._report(
            f"The snapshot was taken on {plural(int(str(state['world_size'])), 'worker')}, and now "
            f"there {'is' if self._group.world_size == 1 else 'are'} {self._group.world_size}: the "
            "samples and their order are the same, but sums are rounded otherwise, so that the "
            "last bits may differ (with --shards they don't)"
        )


def _optimizer_file(number: int) -> str:
    return "optimizer" if number == 0 else f"optimizer-{number}"
