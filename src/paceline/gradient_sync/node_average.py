"""Gradients averaged in the memory that the workers of a node share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from paceline.distributed.node_memory import NodeMemory
from paceline.gradient_sync.buckets import (
    MIN_BYTES_WITHIN_NODE,
    Bucket,
    Layout,
    bucket_bytes,
    lay_out,
)
from paceline.gradient_sync.network_model import ring_bytes
from paceline.gradient_sync.ordered.node_exchange import NodeExchange


@dataclass(frozen=True, kw_only=True)
class _Named:
    """A bucket, and the names of its parameters."""

    names: list[str]
    bucket: Bucket
    layout: Layout
    averages: dict[str, Tensor]
    """By name: where its gradients go, and then its averages are."""


@final
class NodeAverage:
    """Averages a model's gradients over the workers of one node, whose tensors are in its memory.

    They are added along one tree in the order of the workers, then divided by their number.
    """

    has_stages = False

    def __init__(self, memory: NodeMemory, module: nn.Module) -> None:
        """Create the node average.

        Args:
            memory: What the workers share; this object's own.
            module: Whose gradients come.
        """
        self._workers = memory.workers
        self._exchange = NodeExchange(memory, memory.workers, divisor=memory.workers)
        self._module = module
        self._names: list[str] = []
        """Of the parameters that are trained, in the order of the module."""
        self._buckets: list[_Named] = []
        self._bucket_of: dict[str, _Named] = {}
        self._left: list[_Named] = []
        """Buckets of the step."""

    def average_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace gradients by their average over the workers. Collective, blocks."""
        for names in self.buckets(gradients):
            if present := [name for name in names if name in gradients]:
                self.start(present, [gradients[name] for name in present])
        averages = self.finish()
        for name, gradient in gradients.items():
            gradient.copy_(averages[name])

    def buckets(self, _like: Mapping[str, Tensor]) -> list[list[str]]:
        """Cut all that is trained into buckets, the last ones first.

        Collective where other parameters are trained than before.
        """
        names = [name for name, p in self._module.named_parameters() if p.requires_grad]
        if names != self._names:
            self._names, self._buckets = names, self._cut(names)
            self._bucket_of = {name: named for named in self._buckets for name in named.names}
        return [named.names for named in self._buckets]

    def open_stream(self, _device: torch.device) -> None:
        """Be ready to `start` during a backward pass: it always is."""

    @torch.no_grad()
    def start(self, names: Sequence[str], gradients: list[Tensor]) -> None:
        """Start to average one bucket. Collective, but doesn't block.

        Args:
            names: One of `buckets`, or some of it, in its order.
            gradients: Of these; they stay as they are until `finish`.
        """
        named = self._bucket_of[names[0]]
        torch._foreach_copy_([named.averages[name] for name in names], gradients)
        self._exchange.send(named.bucket, named.layout)
        self._left.append(named)

    def poll(self) -> None:
        """Add up buckets that have arrived. Collective, but doesn't block."""
        with torch.no_grad():
            self._exchange.poll()

    @torch.no_grad()
    def finish(self, *, keep: bool = True) -> Mapping[str, Tensor]:
        """Wait for all buckets. Collective.

        Args:
            keep: Whether the averages are wanted; otherwise it is as if nothing had left.

        Returns:
            The averages, in memory that stays theirs until the next `start`.
        """
        if self._left:
            self._exchange.finish(0)
        left, self._left = self._left, []
        if not keep:
            return {}
        return {name: tensor for named in left for name, tensor in named.averages.items()}

    def release(self) -> None:
        """Leave the others. Local to the worker; averages that are in use stay."""
        self._exchange.release()
        for named in self._buckets:
            named.bucket.free()
        self._names, self._buckets, self._bucket_of = [], [], {}

    def wire_bytes(self, tensors: Sequence[Tensor]) -> float:
        """Count what one worker would send for gradients of these parameters."""
        return ring_bytes(sum(tensor.nbytes for tensor in tensors), self._workers)

    def _cut(self, names: Sequence[str]) -> list[_Named]:
        """Put parameters into buckets in shared memory, and let go of those before. Collective."""
        for named in self._buckets:
            named.bucket.free()
        self._exchange.reset()
        own = dict(self._module.named_parameters())
        parameters, workers = [own[name] for name in names], self._workers
        most = bucket_bytes(sum(p.nbytes for p in parameters), workers, workers, by_memory=True)
        order = range(len(names))[::-1]
        layout = lay_out(parameters, order, most, workers, workers, least=MIN_BYTES_WITHIN_NODE)
        self._exchange.prepare(layout)
        made = []
        for bucket in layout.buckets:
            of_bucket = [names[m.index] for m in bucket.members]
            averages = dict(zip(of_bucket, bucket.take().views, strict=True))
            made.append(_Named(names=of_bucket, bucket=bucket, layout=layout, averages=averages))
        return made
