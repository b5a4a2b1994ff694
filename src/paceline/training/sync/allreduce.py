"""All-reduce in every step: by DistributedDataParallel, or an `Averager` in its place."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from paceline.data.batch import Batch
from paceline.distributed.node_memory import connect_node
from paceline.gradient_sync.compression import Compression
from paceline.gradient_sync.node_average import NodeAverage
from paceline.gradient_sync.replica import Replica
from paceline.training.context import TrainingContext
from paceline.training.optimizer_step import describe_unused
from paceline.training.sync.base import GradientSync


class ReplicaSync(GradientSync):
    """Leaves it to each model's `Replica` to average its gradients during the backward pass."""

    def __init__(self, context: TrainingContext) -> None:
        """Create the replica sync.

        Args:
            context: Of the training.
        """
        self.context = context
        self.replicas = context.replicas
        self._optimizer_step, self._step_profiler = (
            context.optimizer_step,
            context.optimizer_step.step_profiler,
        )
        self._workers = context.group.world_size

    def backward(self, loss: Tensor, batch: Batch | None, *, more: bool = False) -> None:
        """Average gradients, weighted by samples."""
        if batch is None:
            self._optimizer_step.has_stepped_alone = True
            self._optimizer_step.run_backward(loss, 1.0, completes=True)
        else:
            # The workers' gradients are averaged, not summed.
            self._optimizer_step.run_backward(
                loss, batch.local * self._workers / batch.total, completes=batch.last
            )
            if not batch.last:
                return
        for replica in self.replicas:
            unused = replica.finish_backward()
            if unused:
                self._report_unused(replica, unused)
        self._step_profiler.end()

    def _report_unused(self, replica: Replica, unused: Sequence[str]) -> None:
        # Those that the loop has frozen are meant to have no gradient.
        known = replica.parameters
        if left_out := [name for name in unused if known[name].requires_grad]:
            name = type(replica.module).__name__
            self._optimizer_step.report(describe_unused(name, left_out))


@final
class AllReduceSync(ReplicaSync):
    """Averages all gradients in every step, in full or rounded to bfloat16 on the way.

    In full they go through memory where all workers are on one node, and have no GPUs.
    """

    def __init__(self, context: TrainingContext) -> None:
        """Create the all reduce sync.

        Args:
            context: Of the training.
        """
        super().__init__(context)
        self._in_memory: list[NodeAverage] = []

    def setup(self, step: int) -> None:
        """Choose how the gradients travel. Collective."""
        if self.context.config.sync.sync_precision == "bf16":
            for replica in self.replicas:
                replica.compression = Compression()
            return
        for replica in self.replicas if self._workers > 1 else ():
            memory = connect_node(self.context.group)
            if memory is not None:
                averager = NodeAverage(memory, replica.module)
                replica.defer_to(averager)
                self._in_memory.append(averager)

    def close(self) -> None:
        """Leave the node's other workers."""
        for averager in self._in_memory:
            averager.release()
        self._in_memory = []
