"""Evaluating a run: figures as in training, each sample once, a confusion matrix."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.data.memory import MemorySource
from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.training.evaluation.distributed_mean import Metrics
from paceline.training.evaluation.evaluate_run import evaluate_model
from tests.support.trainings import pictures, plain_net

CLASSES = 7


def evaluate(samples: int, top: int) -> tuple[Metrics, int, Tensor]:
    torch.manual_seed(0)
    return evaluate_model(
        plain_net(CLASSES),
        MemorySource(pictures(samples, CLASSES)),
        Group(Placement(), torch.device("cpu"), "none"),
        loss=F.cross_entropy,
        forward_context=nullcontext,
        top=top,
        num_classes=CLASSES,
        batch_size=4,
    )


@pytest.mark.parametrize("count", [1, 13, 24])
def test_figures_equal_one_pass_over_everything(count: int) -> None:
    torch.manual_seed(0)
    net = plain_net(CLASSES).eval()
    (batch,) = MemorySource(pictures(count, CLASSES)).eval_batches(0, 1, count)
    with torch.no_grad():
        outputs = net(batch.inputs)
    best = outputs.topk(5, dim=1).indices == batch.targets[:, None]
    cells = batch.targets * CLASSES + outputs.argmax(1)
    expected = torch.bincount(cells, minlength=CLASSES**2).view(CLASSES, CLASSES)
    figures, samples, confusion = evaluate(count, 5)
    assert samples == count
    assert figures["accuracy"] == int(best[:, 0].sum()) / count
    assert figures["top5_accuracy"] == int(best.sum()) / count
    assert figures["loss"] == pytest.approx(float(F.cross_entropy(outputs, batch.targets)))
    assert torch.equal(confusion, expected)


def test_without_classes_only_the_loss_is_counted() -> None:
    figures, samples, _ = evaluate(13, 0)
    assert (list(figures), samples) == (["loss"], 13)
