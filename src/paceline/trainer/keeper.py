"""Snapshots of a training: taking it apart, having it written, putting it back together."""

from collections.abc import Callable, Mapping
from typing import final

import torch
from torch import Tensor, nn

from paceline.checkpoint.fingerprint import weights_sha256
from paceline.checkpoint.flatten import flatten_optimizer, restore_optimizer
from paceline.checkpoint.format import Snapshot, read_snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.writer import SnapshotWriter
from paceline.dist.group import Group
from paceline.errors import SnapshotError
from paceline.metrics.counters import StepCounters, Totals
from paceline.optim.table import OPTIMIZER_OPTIONS
from paceline.sync.buffers import averaged, gather_buffers, local_buffers, pack, unpack
from paceline.trainer.state import TrainState

_COUNTED = 4
"""Figures in a row of `Totals`."""


@final
class SnapshotKeeper:
    """Saves and restores what a worker trains with. Rank 0 writes; every worker takes part."""

    def __init__(
        self,
        *,
        store: SnapshotStore,
        report: Callable[[str], None],
        group: Group,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        counters: StepCounters,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._store = store
        self._report = report
        self._group = group
        self._model = model
        self._optimizer = optimizer
        self._counters = counters
        self._scaler = scaler
        self._writer = SnapshotWriter(store, report) if group.rank == 0 else None

    @property
    def written(self) -> int:
        """Snapshots that this worker has published."""
        return self._writer.written if self._writer else 0

    @property
    def skipped(self) -> int:
        """Snapshots left out because the one before was still being written."""
        return self._writer.skipped if self._writer else 0

    def save(self, state: TrainState, *, best: bool, must: bool) -> None:
        """Copy the training's state and have it written in the background. Collective.

        Args:
            state: Where the training stands.
            best: Also keep it as the best by validation.
            must: Where the one before is still being written, wait for it rather than skip this.
        """
        own = torch.cat([pack(local_buffers(self._model)), self._counters.totals.as_row()])
        gathered = self._group.gather_rows(own)
        if self._writer is None:
            return
        rows, counted = gathered[:, :-_COUNTED].contiguous(), gathered[:, -_COUNTED:]
        tensors, optimizer = flatten_optimizer(self._optimizer, self._model.named_parameters())
        snapshot = Snapshot(
            step=state.step,
            tensors={
                "model": self._model_tensors(averaged(rows)),
                "optimizer": tensors,
                "workers": {"buffers": rows},
            },
            state={
                "position": state.to_json(),
                "counted": counted.tolist(),
                "optimizer": optimizer,
                "scaler": self._scaler.state_dict() if self._scaler else None,
                "world_size": self._group.world_size,
            },
        )
        self._writer.offer(snapshot, best=best, wait=must)

    def restore_newest(self) -> TrainState | None:
        """Go back to the newest snapshot that verifies. Collective.

        Rank 0 looks for it (damaged ones are set aside, and that is said); the others read the one
        that it found.

        Returns:
            Where the training stands; None where there is no snapshot.

        Raises:
            SnapshotError: The snapshot doesn't fit this model or optimizer.
        """
        found = None
        if self._group.rank == 0:
            self._store.sweep()
            found = self._store.newest_good(self._report)
        name = str(self._store.path_of(found.step)) if found else ""
        name = self._group.broadcast_text(name)
        if not name:
            return None
        return self._restore(found or read_snapshot(self._store.directory / name))

    def weights_are_finite(self) -> bool:
        """Tell whether no parameter holds NaN or infinity; the same on every worker."""
        found = [parameter.isfinite().all() for parameter in self._model.parameters()]
        return bool(torch.stack(found).all()) if found else True

    def advice(self) -> str:
        """Say which snapshot is the newest, for an error message."""
        steps = self._store.steps()
        if not steps:
            return "No snapshot had been written yet."
        return f"The newest good snapshot is {self._store.path_of(steps[-1])}."

    def flush(self) -> None:
        """Wait until what was saved is on disk, or has failed (which was said)."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Flush, and end the writing thread."""
        if self._writer:
            self._writer.close()

    def fingerprint(self) -> str:
        """Hash the model's weights, with all workers' running statistics averaged. Collective."""
        rows = gather_buffers(local_buffers(self._model), self._group)
        return weights_sha256(self._model_tensors(averaged(rows)))

    def _model_tensors(self, buffers: Tensor) -> dict[str, Tensor]:
        """Name the model's tensors, with these running statistics in place of this worker's."""
        tensors: dict[str, Tensor] = {k: v.detach() for k, v in self._model.state_dict().items()}
        own = local_buffers(self._model)
        filled = {name: torch.empty_like(b, device="cpu") for name, b in own.items()}
        unpack(buffers, filled)
        return tensors | filled

    def _restore(self, snapshot: Snapshot) -> TrainState:
        load_weights(self._model, snapshot.tensors.get("model", {}))
        optimizer = _mapping(snapshot.state.get("optimizer"))
        # What the user asks for now holds, also where it differs from the snapshot's.
        asked = [
            {name: group[name] for name in OPTIMIZER_OPTIONS if name in group}
            for group in self._optimizer.param_groups
        ]
        restore_optimizer(
            self._optimizer,
            self._model.named_parameters(),
            snapshot.tensors.get("optimizer", {}),
            optimizer,
        )
        for group, options in zip(self._optimizer.param_groups, asked, strict=True):
            group.update(options)
        scaler = snapshot.state.get("scaler")
        if self._scaler is not None and scaler is not None:
            self._scaler.load_state_dict(dict(_mapping(scaler)))
        self._restore_own(snapshot)
        return TrainState.from_json(snapshot.state.get("position"))

    def _restore_own(self, snapshot: Snapshot) -> None:
        """Give this worker back its own statistics and sums.

        On another number of workers all go on from the average, and rank 0 carries the sums.
        """
        counted = torch.tensor(snapshot.state.get("counted"), dtype=torch.float64)
        if snapshot.state.get("world_size") == self._group.world_size:
            rows = snapshot.tensors["workers"]["buffers"]
            unpack(rows[self._group.rank], local_buffers(self._model))
            self._counters.reset(Totals.from_row(counted[self._group.rank]))
        elif self._group.rank == 0:
            self._counters.reset(Totals.from_row(counted.sum(0)))


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put a snapshot's weights into a model, in the model's own memory format.

    Raises:
        SnapshotError: Names or shapes differ; the first differences are named.
    """
    own = model.state_dict()
    wrong = [f"it lacks {name}" for name in own.keys() - tensors.keys()]
    wrong += [f"it holds {name}, which the model lacks" for name in tensors.keys() - own.keys()]
    wrong += [
        f"{name} has shape {tuple(tensors[name].shape)} in it, {tuple(own[name].shape)} here"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    ]
    if wrong:
        shown = "; ".join(sorted(wrong)[:5])
        raise SnapshotError(f"the snapshot's weights don't fit the model: {shown}")
    model.load_state_dict(dict(tensors))


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise SnapshotError("the snapshot's state isn't complete")
    return value
