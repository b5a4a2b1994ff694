import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.errors import UsageError
from paceline.trainer.job import LossName
from paceline.trainer.losses import build_loss


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 5, (9,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_cross_entropy_is_torchs(smoothing: float) -> None:
    logits, targets = batch()
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    assert torch.equal(build_loss("cross_entropy", smoothing)(logits, targets), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_nll_of_log_probabilities_equals_cross_entropy_of_logits(smoothing: float) -> None:
    logits, targets = batch()
    expected = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    found = build_loss("nll", smoothing)(logits.log_softmax(1), targets)
    torch.testing.assert_close(found, expected)


def test_a_jobs_own_loss_is_taken_as_it_is() -> None:
    assert build_loss(F.mse_loss, 0.0) is F.mse_loss
    with pytest.raises(UsageError, match="--label-smoothing works with the losses"):
        build_loss(F.mse_loss, 0.1)


def test_an_unknown_name_lists_the_known_ones() -> None:
    name: LossName = "hinge"  # type: ignore[assignment]  # what a user may write
    with pytest.raises(UsageError, match=r"unknown loss 'hinge'\. Known: cross_entropy, nll"):
        build_loss(name, 0.0)
