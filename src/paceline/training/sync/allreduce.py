"""Gradients averaged in every step: by DistributedDataParallel, or by what takes its place."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.gradient_sync.compression import Compression
from paceline.gradient_sync.replica import Replica
from paceline.training.context import TrainingContext
from paceline.training.optimizer_step import describe_unused
from paceline.training.sync.base import GradientSync


class ReplicaSync(GradientSync):
    """Leaves it to each model's `Replica` to average its gradients."""

    def __init__(self, context: TrainingContext, compression: Compression | None = None) -> None:
        """Args:
        context: Of the training. One that was made of the same context before has its models.
        compression: What gradients travel in; by default they do as they are.
        """
        self.context = context
        self.compression = compression
        self.replicas = context.replicas
        self._stepper, self._pace = context.stepper, context.stepper.pace
        self._workers = context.group.world_size

    def add_model(self, module: nn.Module, forward: Callable[..., object] | None) -> None:
        """See `GradientSync`."""
        self.replicas.append(Replica(module, self.context.group, forward, self.compression))

    def begin_piece(self, piece: Batch) -> None:
        """Have only the last piece's backward pass average."""
        self._hold_back(syncing=piece.last)

    def backward(self, loss: Tensor, batch: Batch | None, *, more: bool = False) -> None:
        """See `GradientSync`: an average weighted by samples."""
        if batch is None:
            self._stepper.begin_alone()
            self._stepper.run_backward(loss, 1.0, completes=True)
        else:
            # The workers' gradients are averaged, not summed.
            self._stepper.run_backward(
                loss, batch.local * self._workers / batch.total, completes=batch.last
            )
            if not batch.last:
                return
        for replica in self.replicas:
            unused = replica.settle()
            if unused:
                name = type(replica.module).__name__
                self._stepper.report(describe_unused(name, unused))
        self._pace.end()

    def abandon_step(self) -> None:
        """See `GradientSync`: nothing of it has been averaged."""
        for replica in self.replicas:
            replica.forget()
        self._hold_back(syncing=True)

    def wire_bytes(self) -> float:
        """See `GradientSync`."""
        return sum(replica.wire_bytes for replica in self.replicas)

    def close(self) -> None:
        """Give the models back as they were."""
        for replica in self.replicas:
            replica.release()

    def _hold_back(self, *, syncing: bool) -> None:
        """Say whether the next backward pass completes the step's gradients."""
        for replica in self.replicas:
            replica.syncing = syncing


@final
class AllReduceSync(ReplicaSync):
    """Averages all gradients in every step, in full or rounded on the way."""

    weights_may_differ = False


def average_in_bf16(context: TrainingContext) -> AllReduceSync:
    """Average gradients that travel with 8 bits of fraction."""
    return AllReduceSync(context, Compression(torch.bfloat16))


def average_in_fp16(context: TrainingContext) -> AllReduceSync:
    """Average gradients that travel with 11 bits of fraction."""
    return AllReduceSync(context, Compression(torch.float16))
