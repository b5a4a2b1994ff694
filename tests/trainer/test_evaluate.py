from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.memory import MemorySource
from paceline.dist.group import Group
from paceline.metrics.counters import Totals
from paceline.trainer.evaluate import Evaluator, evaluating
from tests.support.ranks import run_ranks
from tests.support.trainings import pictures, plain_net

CLASSES = 7


def evaluate(group: Group, samples: int, top: int) -> tuple[Totals, Tensor]:
    torch.manual_seed(0)
    net = plain_net(CLASSES)
    source = MemorySource(pictures(samples, CLASSES))
    evaluator = Evaluator(loss=F.cross_entropy, forward_context=nullcontext, top=top, batch_size=4)
    return evaluator.run(net, source, group, CLASSES)


@pytest.mark.ranks
@pytest.mark.parametrize("samples", [1, 13, 24])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_totals_equal_one_pass_over_everything(world_size: int, samples: int) -> None:
    torch.manual_seed(0)
    net = plain_net(CLASSES)
    (batch,) = MemorySource(pictures(samples, CLASSES)).eval_batches(0, 1, samples)
    with torch.no_grad():
        outputs = net(batch.inputs)
    best = outputs.topk(5, dim=1).indices == batch.targets[:, None]
    cells = batch.targets * CLASSES + outputs.argmax(1)
    expected = torch.bincount(cells, minlength=CLASSES**2).view(CLASSES, CLASSES)
    for totals, confusion in run_ranks(world_size, evaluate, samples, 5):
        assert totals.samples == samples
        assert totals.top1 == int(best[:, 0].sum())
        assert totals.top5 == int(best.sum())
        loss = F.cross_entropy(outputs, batch.targets, reduction="sum")
        assert totals.loss == pytest.approx(float(loss), rel=1e-6)
        assert torch.equal(confusion, expected)


@pytest.mark.ranks
def test_without_classes_only_the_loss_is_counted() -> None:
    for totals, _ in run_ranks(2, evaluate, 13, 0):
        assert (totals.samples, totals.top1, totals.top5) == (13, 0, 0)


def test_evaluation_mode_ends_with_the_evaluation() -> None:
    net = nn.Dropout()
    with evaluating(net):
        assert not net.training
    assert net.training


def test_the_mode_comes_back_after_an_error() -> None:
    net = nn.Dropout()

    def fail() -> None:
        with evaluating(net):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert net.training


def test_a_part_that_the_user_has_frozen_stays_so() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    net[0].eval()
    with evaluating(net):
        assert [part.training for part in net] == [False, False]
    assert [part.training for part in net] == [False, True]
