"""Weights of losses that are means over other units than samples, such as tokens or pixels."""

from collections import deque
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from paceline.data.batch import Batch
from paceline.distributed.device import widest_float
from paceline.errors import UsageError
from paceline.training.context import TrainingContext
from paceline.training.sync.base import GradientSync

Weight = Tensor | float | None
"""Over how many things a loss is a mean; None where it is over samples."""


_NODES = 100
"""Of a loss's graph that are looked at: those near its end."""
_NONE, _MEAN, _SUM = 0, 1, 2
"""torch's numbers for reduction="none", "mean" and "sum"."""
_ELEMENTWISE = ("PowBackward", "AbsBackward")
"""Names of nodes that end losses written by hand, one element for each sample or more."""


_GRAPH_IS_GONE = (
    "paceline: a backward pass of the session leaves no graph behind (it takes no retain_graph). "
    "Where two losses share a part of it, add them: s.backward(first + second), whose gradients "
    "several optimizers may use. What is carried on to the next batch needs .detach()"
)


def check_loss(loss: object, error: Exception) -> None:
    """Refuse what no backward pass can begin with, where one has failed: by what the user gave.

    Args:
        error: What PyTorch says; where it would lead the user astray it gets a note.

    Raises:
        UsageError: It isn't a tensor with one element and a gradient; says what to give.
    """
    if not isinstance(loss, Tensor):
        wrong = (
            f"is a {type(loss).__name__}: s.step and s.backward take the tensor that the loss "
            "function gave, without .item() or float()"
        )
    elif loss.numel() != 1:
        wrong = (
            f"has the shape {tuple(loss.shape)}: s.step and s.backward take one number, the mean "
            "over the batch's samples: loss.mean()"
        )
    elif not loss.requires_grad:
        wrong = (
            "has no gradient: it was computed under torch.no_grad() or from detached values "
            "(.detach(), .item(), NumPy), or no parameter that it depends on is trained "
            "(requires_grad)"
        )
    else:
        if "through the graph a second time" in str(error):
            error.add_note(_GRAPH_IS_GONE)
        return
    raise UsageError(f"the loss {wrong}") from None  # it says more than torch's own error


def describe_weighted_mean(loss: Tensor, samples: int = 1) -> str | None:
    """Say what a loss is a mean over, and what would tell it, where that is seen not to be samples.

    Args:
        loss: Before its backward pass.
        samples: How many it is about: a mean over another number of targets than a multiple of it,
            such as the nodes of graphs, isn't one over samples.
    """
    descriptions: list[str | None] = []
    for node in _nodes(loss):
        if getattr(node, "_saved_reduction", None) == _MEAN:
            is_nll = node.name().startswith("NllLoss")
            description = _describe_nll(node) if is_nll else None
            descriptions.append(description or _describe_rows(node, samples))
    # Several losses may be added up rightly.
    return descriptions.pop() if len(descriptions) == 1 else None


def is_sum_over_samples(loss: Tensor, samples: int) -> bool:
    """Tell whether a loss, or a term of it that is only added, is seen to be a sum over samples.

    Seen are torch's losses with reduction="sum", and a `sum()` of losses without a reduction, of
    squares or of absolute values; none that is divided or multiplied afterwards, which may make up
    for it.

    Args:
        loss: Before its backward pass.
        samples: How many it is about. Of one, a sum is a mean; terms about other things have
            another number of rows, and those about parameters, penalties, aren't counted.
    """
    rows = map(_rows_summed, _nodes(loss, beyond="AddBackward"))
    return samples > 1 and any(count and count % samples == 0 for count in rows)


def _nodes(loss: Tensor, beyond: str = "") -> Iterator[Node]:
    """Go through a loss's graph from its end on, beyond nodes whose names begin so alone."""
    waiting = deque([loss.grad_fn])
    for _ in range(_NODES):
        node = waiting.popleft() if waiting else None
        if node is not None:
            yield node
            if node.name().startswith(beyond):
                waiting.extend(before for before, _ in node.next_functions)


def _rows_summed(node: Node) -> int:
    """Count the rows that a node of a loss's graph sums up; 0 where it isn't known to be a sum."""
    if getattr(node, "_saved_reduction", None) == _SUM:
        target = getattr(node, "_saved_target", None)
        return len(target) if isinstance(target, Tensor) and target.dim() else 0
    before = node.next_functions[0][0] if node.name() == "SumBackward0" else None
    if before is None:
        return 0
    if _is_of_parameters(before):
        return 0  # a penalty
    is_loss = getattr(before, "_saved_reduction", None) == _NONE
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    return int(sizes[0]) if sizes and (is_loss or before.name().startswith(_ELEMENTWISE)) else 0


def _describe_nll(node: Node) -> str | None:
    """Read unit and weight from torch's negative log likelihood node (end of cross entropy)."""
    # What a node has saved are attributes that torch makes for each kind of node.
    reduction, weight, total, targets = (
        getattr(node, f"_saved_{name}", None)
        for name in ("reduction", "weight", "total_weight", "target")
    )
    if reduction != _MEAN or not isinstance(total, Tensor) or not isinstance(targets, Tensor):
        return None
    ignored = int(getattr(node, "_saved_ignore_index", -100))
    counts = targets.ne(ignored).flatten(1).sum(1) if targets.dim() > 1 else None
    if isinstance(weight, Tensor) and len(weight.unique()) > 1:
        return "the weights of its targets' classes: weight=class_weights[targets].sum()"
    if int(total) == targets.numel() or (counts is not None and len(counts.unique()) == 1):
        return None  # as many of each sample
    return "the targets that it doesn't ignore: weight=(targets != ignore_index).sum()"


def _describe_rows(node: Node, samples: int) -> str | None:
    """Compare the number of targets that a loss is a mean over with that of the samples."""
    targets = getattr(node, "_saved_target", None)
    if not isinstance(targets, Tensor) or not targets.dim() or _is_of_parameters(node):
        return None
    if any(size % samples == 0 for size in targets.shape):
        return None  # the samples may stand in another dimension
    return f"its {len(targets)} targets, not over the {samples} samples: weight=len(targets)"


def _is_of_parameters(node: Node) -> bool:
    """Whether a node of a loss's graph is computed from a parameter itself, as a penalty is."""
    return any(
        before is not None and before.name().endswith("AccumulateGrad")
        for before, _ in node.next_functions
    )


@final
class LossWeights:
    """Makes a step's gradient sum(weight x gradient) / sum(weight) over all its losses.

    1. Each loss is multiplied by its weight over its samples, so that what combines gradients by
    samples gives sum(weight x gradient) / samples. 2. With the step's last backward pass the
    weights are added up, part by part in order: the same bits on any number of workers. 3. The
    gradients are multiplied by samples / sum(weight); those of earlier passes stay as they are.
    """

    def __init__(self, context: TrainingContext, sync: GradientSync) -> None:
        """Create the loss weights.

        Args:
            context: Of the training.
            sync: Combines gradients by samples.
        """
        self._context = context
        self._sync = sync
        self.is_plain = self._has_looked = context.division.parts == 1
        """Whether a loss without a weight needs nothing but its backward pass."""
        self.sums: Tensor | None = None
        """(parts,), of `widest_float`: the open step's weights; None before the first one."""
        self._earlier: dict[nn.Parameter, Tensor] = {}
        """Gradients that earlier backward passes have left, as they were before the open step."""

    def backward(self, loss: Tensor, batch: Batch | None, weight: Weight, *, more: bool) -> Tensor:
        """Run a backward pass. Collective as that of the `GradientSync`.

        Args:
            loss: Scalar, a mean.
            batch: What it is about; None where it isn't from the training loader.
            weight: Over how many things.
            more: Another backward pass about the same batch will follow.

        Returns:
            The loss; 0 where it weighs nothing, since a mean over nothing is no number.

        Raises:
            UsageError: A weight in some losses of a step, or where it would mean nothing.
        """
        if weight is None:
            if self.sums is not None:
                self.sums, self.is_plain = None, self._has_looked
                raise UsageError(
                    "a loss without weight=... in a step whose other losses have one: give each "
                    "batch its weight, or none"
                )
            self._look(loss, batch)
            self._sync.backward(loss, batch, more=more)
            return loss
        self._check(more=more or self._context.step.loss_before is not None)
        if self.sums is None:
            self._earlier = self._copy_gradients()
        device = loss.device
        counts = torch.as_tensor(weight, dtype=widest_float(device), device=device).detach()
        loss = torch.where(counts > 0, loss, torch.zeros_like(loss))
        samples = 1 if batch is None else batch.local
        if samples:  # what stands in for a worker's samples counts for nothing
            self._note(counts, batch)
        weighed = loss * (counts / max(samples, 1)).to(loss.dtype)
        self._sync.backward(weighed, batch)
        if batch is None or batch.last:
            self._combine(self._context.group.world_size if batch is None else batch.total)
        return loss

    def _look(self, loss: Tensor, batch: Batch | None) -> None:
        """Say once, of the first loss, that it is no mean over samples, where that can be seen."""
        if not self._has_looked:
            # A loss about all workers' samples counts once: nothing is known of its rows.
            samples = 1 if batch is None or self._is_gathered() else max(batch.local, 1)
            self._report_sum(loss, samples)
            self._report_weighted_mean(loss, samples)
        self.is_plain = self._has_looked = True

    def _report_sum(self, loss: Tensor, samples: int) -> None:
        if is_sum_over_samples(loss, samples):
            parts = self._context.division.parts
            self._context.optimizer_step.report(
                f"the loss is a sum over its samples, and the losses of the {parts} workers or "
                f"shards are averaged: the gradient is 1/{parts} of the whole batch's sum, and "
                'changes with their number. Give the mean (reduction="mean"), and where the '
                "learning rate was chosen for the sum, that rate times the batch's size"
            )

    def _report_weighted_mean(self, loss: Tensor, samples: int) -> None:
        if advice := describe_weighted_mean(loss, samples):
            self._context.optimizer_step.report(
                f"the loss is a mean over {advice.partition(':')[0]}, which each worker or shard "
                "may have another amount of: the training depends on their number, unless "
                f"s.step(loss, ...) or s.backward(loss, ...) has{advice.partition(':')[2]}"
            )

    def _is_gathered(self) -> bool:
        """Whether the open step's loss is about all workers' samples."""
        return self._context.step.gathered == self._context.place

    def _check(self, *, more: bool) -> None:
        if more:
            raise UsageError(
                "weight=... in one of several backward passes about a batch: add the losses up, "
                "each times its weight, and divide by one weight"
            )
        if self._is_gathered():
            raise UsageError(
                "weight=... can't be combined with s.gather(...): what is computed of all workers' "
                "samples counts once. Multiply the loss, or its parts, instead"
            )

    def _note(self, counts: Tensor, batch: Batch | None) -> None:
        division = self._context.division
        if self.sums is None:
            self.is_plain = False
            self.sums = torch.zeros(division.parts, dtype=counts.dtype, device=counts.device)
        mine = division.parts_of(self._context.group.rank).start
        self.sums[batch.part if batch is not None and division.is_fixed else mine] += counts

    def _combine(self, samples: int) -> None:
        """Divide the gradients by all weights of the step. Collective.

        Args:
            samples: Of the step over all workers.
        """
        sums, self.sums, self.is_plain = self.sums, None, self._has_looked
        if sums is None:  # this worker had only what stands in for samples
            division, device = self._context.division, self._context.group.device
            sums = torch.zeros(division.parts, dtype=widest_float(device), device=device)
        total = self._context.group.sum_(sums).sum()
        factor = torch.where(total > 0, samples / total, torch.zeros_like(total))
        parameters = self._parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if dense := [g for g in gradients if not g.is_sparse]:  # torch takes no empty list
            torch._foreach_mul_(dense, factor)
        for gradient in gradients:
            if gradient.is_sparse:
                gradient.mul_(factor.to(gradient.dtype))
        # Earlier passes' share has been multiplied as well: add what it lacks.
        earlier, self._earlier = self._earlier, {}
        for parameter in parameters:
            if parameter in earlier and parameter.grad is not None:
                parameter.grad.add_(earlier[parameter] * (1 - factor).to(parameter.grad.dtype))

    def _copy_gradients(self) -> dict[nn.Parameter, Tensor]:
        return {p: p.grad.clone() for p in self._parameters() if p.grad is not None}

    def _parameters(self) -> list[nn.Parameter]:
        """List the parameters of all optimizers, each once."""
        optimizers = self._context.components.optimizers
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        return list({id(p): p for group in groups for p in group["params"]}.values())
