from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import JobError, UsageError
from paceline.training.job import LossFunction, LossName
from paceline.training.losses import build_loss


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
    outputs, targets = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    assert build_loss(F.mse_loss, 0.0)(outputs, targets) == 6.5
    with pytest.raises(UsageError, match="--label-smoothing works with the losses"):
        build_loss(F.mse_loss, 0.1)


def test_an_unknown_name_lists_the_known_ones() -> None:
    name: LossName = "hinge"  # type: ignore[assignment]  # what a user may write
    with pytest.raises(UsageError, match=r"unknown loss 'hinge'\. Known: cross_entropy, nll"):
        build_loss(name, 0.0)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="none"),
        nn.MSELoss(reduction="sum"),
        partial(F.cross_entropy, reduction="sum"),
    ],
    ids=["module", "another module", "partial function"],
)
def test_a_loss_that_isnt_a_mean_is_refused_at_once(loss: LossFunction) -> None:
    with pytest.raises(JobError, match=r"reduction='(none|sum)'; it should be 'mean'"):
        build_loss(loss, 0.0)


def test_a_loss_that_gives_no_single_number() -> None:
    def apart(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(JobError, match=r"gave \(9,\) instead of one number; .*mean"):
        build_loss(apart, 0.0)(*batch())
    with pytest.raises(JobError, match="gave float instead of one number"):
        build_loss(lambda a, b: float(a.mean()), 0.0)(*batch())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", nn.CrossEntropyLoss()], ids=str)
def test_a_target_that_the_model_has_no_score_for(loss: LossName | LossFunction) -> None:
    outputs, targets = batch()
    targets[3] = 5
    checked = build_loss(loss, 0.0)
    message = "a target is class 5, but the model gives 5 scores a sample, for the classes 0 to 4"
    with pytest.raises(JobError, match=message):
        checked(outputs, targets)
    targets[4] = -1
    with pytest.raises(JobError, match=message):
        checked(outputs, targets)
    targets[3] = 1
    with pytest.raises(JobError, match="a target is class -1"):
        checked(outputs, targets)


def test_the_first_batchs_classes_are_looked_at_before_a_gpu_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs, targets = batch()
    # What a loss leaves out, and targets that are no classes.
    targets[3] = -100
    expected = F.cross_entropy(outputs, targets)
    assert torch.equal(build_loss("cross_entropy", 0.0)(outputs, targets), expected)
    targets[3] = 255
    for loss in (nn.CrossEntropyLoss(ignore_index=255), partial(F.nll_loss, ignore_index=255)):
        assert build_loss(loss, 0.0)(outputs, targets).isfinite()
    assert build_loss(lambda o, t: (o[:, 0] - t).mean(), 0.0)(outputs, targets).isfinite()

    def fails(*_: object, **__: object) -> Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(F, "cross_entropy", fails)
    for wrong in ("cross_entropy", F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1)):
        with pytest.raises(JobError, match="a target is class 255"):
            build_loss(wrong, 0.0)(outputs, targets)


def test_as_many_scores_as_classes() -> None:
    message = "gives 5 scores a sample, and there are 10 classes.*num_classes"
    with pytest.raises(JobError, match=message):
        build_loss("cross_entropy", 0.0, num_classes=10)(*batch())
    assert build_loss("cross_entropy", 0.0, num_classes=5)(*batch()).ndim == 0

    def fails(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(JobError, match=message):
        build_loss(fails, 0.0, num_classes=10)(*batch())


def test_other_errors_of_a_loss_are_its_own() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        return [outputs][1]

    with pytest.raises(IndexError, match="list index"):
        build_loss(broken, 0.0)(*batch())
